"""What a process does before its first iteration; see `start`."""

from caffepy.phases.start import START, Phase, Phases, announcing, phase

__all__ = ["START", "Phase", "Phases", "announcing", "phase"]
