"""What a process does before its first iteration (`start`), and what others compile for it (`kernel_processes`)."""

from caffepy.phases.start import SHORT_TURN, START, Phase, Phases, announcing, phase

__all__ = ["SHORT_TURN", "START", "Phase", "Phases", "announcing", "phase"]
