"""A fake vLLM engine: a real HTTP server with a block pool, TTLs and single-use reads."""

from tests.fakes.engine.blocks import PoolState
from tests.fakes.engine.config import EngineClock, EngineConfig
from tests.fakes.engine.engine import FakeEngine
from tests.fakes.engine.faults import Faults

__all__ = ["EngineClock", "EngineConfig", "FakeEngine", "Faults", "PoolState"]
