"""What a process does before its first iteration (`start`), and what others compile for it (`kernel_processes`)."""

from caffepy.phases.start import START, Phase, Phases, announcing, phase

__all__ = ["START", "Phase", "Phases", "announcing", "phase"]
