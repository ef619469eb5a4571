"""The suite's fleet of real vLLM engines on this machine's CPU."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kvtide.local.fleet import SERVICES, LocalFleet
from kvtide.local.metrics import BYTES_READ, UNSAFE_READS
from kvtide.runtime.engine_command import EngineRole
from tests.engine_support.tiny_model import write_tiny_model
from tests.fakes.waiting import eventually
from tests.suite.control_plane import CLAIM_LIMIT_S
from tests.suite.fleets import Pool, Role

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvtide.v1 import node_pb2

_MODEL_DIR = Path("build/tiny-model")
_USAGE = "vllm:kv_cache_usage_perc"
_MAX_MODEL_LEN_TOKENS = 8_192
#: Where the shipped values give up on something late: two cores under three engines are late.
_PATIENT = {
    "registry.grant_wait_s": "3",
    "registry.claim_limit_s": str(CLAIM_LIMIT_S),
    "registry.grant_wait_limit_s": "20",
    "router.claim_timeout_s": "20",
}
#: Long enough to be claimed (10 s must be left), short enough to sit out.
_SHORT_TTL_S = 30.0
_PIN_GRACE_S = 5.0


class CpuFleet:
    """Implements ``Fleet``; an async context. Starting it takes most of a minute."""

    def __init__(self, *, whole: int = 1, ttl_s: float | None = None) -> None:
        engine: dict[str, Any] = {"max_model_len_tokens": _MAX_MODEL_LEN_TOKENS}
        if ttl_s is not None:
            engine["decoder_kv_blocks_ttl_s"] = ttl_s
        self._ttl_s = ttl_s or 480.0
        self.local = LocalFleet(
            write_tiny_model(_MODEL_DIR),
            whole=whole,
            engine=engine,
            role_engine={EngineRole.PREFILL: {"prefix_caching": False}},
            settings=_PATIENT,
            log_dir=Path("build/logs") / ("suite" if ttl_s is None else "suite-short-ttl"),
        )
        self._reference_url = ""

    @property
    def fleet(self) -> Self:
        """See ``LeasePair``."""
        return self

    @property
    def base_url(self) -> str:
        """See ``Fleet``."""
        return self.local.http_url

    @property
    def grpc_address(self) -> str:
        """See ``Fleet``."""
        return self.local.grpc_address

    @property
    def reference_url(self) -> str:
        """See ``Fleet``."""
        return self._reference_url or self.local.engine("whole-0").url

    @property
    def model(self) -> str:
        """See ``Fleet``."""
        return self.local.model_name

    @property
    def block_size_tokens(self) -> int:
        """See ``Fleet``."""
        return 128

    @property
    def max_model_len_tokens(self) -> int:
        """See ``Fleet``."""
        return _MAX_MODEL_LEN_TOKENS

    async def usable_blocks(self, role: Role) -> int:
        """See ``Fleet``. vLLM hands block 0 out to nobody."""
        return (await self._node(role)).info.block_count - 1

    async def pool(self, role: Role) -> Pool:
        """See ``Fleet``."""
        node = await self._node(role)
        usage = (await self._metrics(role))[_USAGE]
        usable = await self.usable_blocks(role)
        return Pool(usable - round(usage * usable), node.load.pinned_blocks)

    async def unsafe_reads(self) -> float:
        """See ``Fleet``."""
        both = [await self._metrics(role) for role in ("prefill", "decode")]
        return sum(metrics.get(UNSAFE_READS, 0.0) for metrics in both)

    async def pulled_bytes(self) -> float:
        """See ``Fleet``."""
        return (await self._metrics("prefill")).get(BYTES_READ, 0.0)

    async def kill_engine(self, role: Role) -> None:
        """See ``Fleet``."""
        await asyncio.to_thread(self.local.kill, f"{role}-0")

    async def restart_engine(self, role: Role) -> None:
        """See ``Fleet``."""
        await asyncio.to_thread(self.local.restart, f"{role}-0")

    async def restart_services(self) -> None:
        """See ``Fleet``."""
        await asyncio.to_thread(self.local.restart, SERVICES)
        await asyncio.to_thread(self.local.wait_ready)

    async def outlast_prefill(self) -> None:
        """See ``Fleet``."""

    async def sit_out(self, duration_s: float) -> None:
        """See ``Fleet``."""
        await asyncio.sleep(duration_s)

    @asynccontextmanager
    async def expiring(self) -> AsyncIterator[CpuFleet]:
        """See ``Fleet``: engines of its own, whose leases last half a minute."""
        short = CpuFleet(whole=0, ttl_s=_SHORT_TTL_S)
        short._reference_url = self.reference_url
        async with short:
            yield short

    async def expire(self) -> None:
        """See ``LeasePair``."""
        await asyncio.sleep(self._ttl_s + _PIN_GRACE_S)

        async def gone() -> bool:
            return (await self.pool("decode")).pinned_blocks == 0

        await eventually(gone)

    async def _node(self, role: Role) -> node_pb2.Node:
        nodes = await asyncio.to_thread(self.local.nodes)
        return nodes[f"{role}-0"]

    async def _metrics(self, role: Any) -> dict[str, float]:
        return await asyncio.to_thread(partial(self.local.metrics, f"{role}-0"))

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.local.start)
        return self

    async def __aexit__(self, *_error: object) -> None:
        await asyncio.to_thread(self.local.stop)
