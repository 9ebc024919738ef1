"""What a process does before its first iteration (`start`), and what others compile for it (`kernel_processes`).

Every part may import it.
"""

from caffepy.phases.start import START, SWITCH_INTERVAL, Phase, Phases, announcing, phase

__all__ = ["START", "SWITCH_INTERVAL", "Phase", "Phases", "announcing", "phase"]
