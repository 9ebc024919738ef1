"""What a process does before its first iteration; see `start`."""

from caffepy.phases.start import SHORT_TURN, START, Phase, Phases, announcing, phase

__all__ = ["SHORT_TURN", "START", "Phase", "Phases", "announcing", "phase"]
