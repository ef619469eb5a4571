"""One interface over both fleets that the suite runs on: fake engines, and real ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from tests.fakes.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Pool:
    """One engine's KV pool, as far as both kinds of engines tell."""

    free_blocks: int
    pinned_blocks: int
    """Blocks kept for leases (decode)."""


ROLES: tuple[Role, ...] = ("prefill", "decode")

#: Longer than prefill keeps blocks that nobody reads, in seconds.
_PATIENCE_S = 45.0


async def decode_pins(fleet: Fleet, blocks: int) -> None:
    """Wait until decode keeps just that many blocks for leases, or fail with what it has."""
    await _wait_for_pool(fleet, "decode", lambda pool: pool.pinned_blocks == blocks)


async def nothing_is_kept(fleet: Fleet, *roles: Role) -> None:
    """Wait until the pools (of both engines) are wholly free, or fail with what is left."""
    for role in roles or ROLES:
        empty = Pool(await fleet.usable_blocks(role), 0)
        await _wait_for_pool(fleet, role, empty.__eq__)


async def _wait_for_pool(fleet: Fleet, role: Role, wanted: Callable[[Pool], bool]) -> None:
    seen: list[Pool] = []

    async def reached() -> bool:
        seen.append(await fleet.pool(role))
        return wanted(seen[-1])

    try:
        await eventually(reached, timeout_s=_PATIENCE_S)
    except AssertionError:
        msg = f"{role} still has {seen[-1]}"
        raise AssertionError(msg) from None


class LeasePair(Protocol):
    """A fleet whose leases the test can let run out."""

    @property
    def fleet(self) -> Fleet:
        """Where to talk to it."""
        ...

    async def expire(self) -> None:
        """Let every lease that is held now run out, and wait until the engine has freed it."""
        ...


class Fleet(Protocol):
    """One prefill and one decode engine behind kvtide, and a monolith to compare with.

    Prefill has no prefix cache, as in the published set-up, so that every token
    that it did not compute was pulled.
    """

    @property
    def base_url(self) -> str:
        """Kvtide's OpenAI endpoint, without a path."""
        ...

    @property
    def grpc_address(self) -> str:
        """host:port of kvtide's gRPC services."""
        ...

    @property
    def reference_url(self) -> str:
        """The monolith's OpenAI endpoint."""
        ...

    @property
    def model(self) -> str:
        """The model's name in requests."""
        ...

    @property
    def block_size_tokens(self) -> int:
        """Tokens a block."""
        ...

    @property
    def max_model_len_tokens(self) -> int:
        """The longest prompt and answer together."""
        ...

    async def usable_blocks(self, role: Role) -> int:
        """Blocks that are free when the engine keeps nothing."""
        ...

    async def pool(self, role: Role) -> Pool:
        """The engine's pool now."""
        ...

    async def unsafe_reads(self) -> float:
        """Reads of blocks that decode had let go, since its last start. Must stay 0."""
        ...

    async def pulled_bytes(self) -> float:
        """Bytes that prefill read over NIXL, since its last start."""
        ...

    async def kill_engine(self, role: Role) -> None:
        """Kill -9."""
        ...

    async def restart_engine(self, role: Role) -> None:
        """Kill it if it runs, start it on the same ports, and wait until it gets turns again."""
        ...

    async def restart_services(self) -> None:
        """Restart router, registry and node health, and wait until turns are served again."""
        ...

    async def outlast_prefill(self) -> None:
        """Let prefill's own leases end, where that takes no time; else the test's end waits."""
        ...

    async def sit_out(self, duration_s: float) -> None:
        """Let that time pass, by the clocks that leases go by."""
        ...

    def expiring(self) -> AbstractAsyncContextManager[LeasePair]:
        """A fleet whose leases can be made to run out: this one, or one of its own."""
        ...
