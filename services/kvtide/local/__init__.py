"""Everything on one machine: a fleet of real engines, and the demo that runs on it."""

from kvtide.local.fleet import SERVICES, LocalEngine, LocalFleet
from kvtide.local.processes import ProcessError

__all__ = ["SERVICES", "LocalEngine", "LocalFleet", "ProcessError"]
