"""What a run needs and how long it takes, before it is run: `lightnet plan`."""

from .hardware import Hardware, load_hardware
from .planner import Plan, plan
from .rows import Row

__all__ = ["Hardware", "Plan", "Row", "load_hardware", "plan"]
