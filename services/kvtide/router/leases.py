"""The router's dealings with the block-lease registry: claims, settlements, closing.

Three promises. The registry never fails a turn: down or slow, the turn goes on without a lease.
A claim that a turn did not wait for is given back when it arrives after all. And a turn is
settled in the background, where no client can cancel it, while the next claim of the same
conversation waits until that settlement has been made: the registry must know that a grant is
on its way before it is asked for it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from kvtide.registry.ports import (
    ClaimResult,
    ConversationKey,
    LeaseRegistry,
    ReadOutcome,
    Settlement,
)
from kvtide.runtime import DeadlineExceeded, get_logger

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

__all__ = ["LeaseDesk"]

_LATE_CLAIM_LIMIT_S = 30.0
_SETTLE_LIMIT_S = 5.0

_T = TypeVar("_T")

_log = get_logger(__name__)


class LeaseDesk:
    """All claims and settlements of one router."""

    def __init__(self, registry: LeaseRegistry, *, claim_timeout_s: float) -> None:
        self._registry = registry
        self._claim_timeout_s = claim_timeout_s
        self._tasks: set[asyncio.Task[Any]] = set()
        self._settling: dict[ConversationKey, set[asyncio.Task[None]]] = {}

    async def claim(self, key: ConversationKey) -> ClaimResult | None:
        """Open a turn and claim what it may read; None when the registry gives no answer.

        Waits for `claim_timeout_s` at most. The call itself is not cut short, by the timeout or
        by cancellation: it may have claimed a lease by then, which would stay locked until the
        claim ran out. It goes on alone, and what it brings is given back.
        """
        task = self._spawn(self._claim(key))
        try:
            await asyncio.wait({task}, timeout=self._claim_timeout_s)
        except asyncio.CancelledError:
            task.add_done_callback(lambda late: self._give_back(key, late))
            raise
        if not task.done():
            task.add_done_callback(lambda late: self._give_back(key, late))
            _log.warning("claim_timed_out", tenant=key.tenant, conversation_id=key.conversation_id)
            return None
        return task.result()

    def settle(self, settlement: Settlement) -> None:
        """Start to report how a turn ended; returns at once and never fails."""
        task = self._spawn(self._settle(settlement))
        settling = self._settling.setdefault(settlement.key, set())
        settling.add(task)
        task.add_done_callback(lambda done: self._settled(settlement.key, done))

    async def close_conversation(self, key: ConversationKey) -> None:
        """End a conversation, after its last settlement. Raises `Unavailable`."""
        try:
            async with asyncio.timeout(_SETTLE_LIMIT_S):
                await self._settlements_of(key)
                await self._registry.close_conversation(key)
        except TimeoutError:
            message = "the block-lease registry did not answer in time; retry"
            raise DeadlineExceeded("registry_timeout", message) from None

    async def stop(self) -> None:
        """Finish what is being said to the registry, for as long as one settlement may take."""
        try:
            async with asyncio.timeout(_SETTLE_LIMIT_S):
                while self._tasks:
                    await asyncio.wait(set(self._tasks))
        except TimeoutError:
            for task in self._tasks:
                task.cancel()

    async def _claim(self, key: ConversationKey) -> ClaimResult | None:
        try:
            async with asyncio.timeout(_LATE_CLAIM_LIMIT_S):
                await self._settlements_of(key)
                return await self._registry.claim(key)
        except Exception as error:  # noqa: BLE001 - whatever it is, the turn goes on without
            _log.warning("claim_failed", conversation_id=key.conversation_id, error=repr(error))
            return None

    def _give_back(self, key: ConversationKey, late: asyncio.Task[ClaimResult | None]) -> None:
        opened = None if late.cancelled() else late.result()
        if opened is None:
            return
        claim_id = opened.claimed.claim_id if opened.claimed else ""
        # Nothing was sent to a prefill engine under this claim.
        self.settle(Settlement(key, opened.generation, claim_id, ReadOutcome.NOT_READ))

    async def _settlements_of(self, key: ConversationKey) -> None:
        settling = self._settling.get(key)
        if settling:
            await asyncio.wait(set(settling))

    async def _settle(self, settlement: Settlement) -> None:
        try:
            async with asyncio.timeout(_SETTLE_LIMIT_S):
                await self._registry.settle(settlement)
        except Exception as error:  # noqa: BLE001 - nobody waits for this task
            # Harmless: the claim runs out by itself, and the grant comes without being awaited.
            _log.warning(
                "settle_failed",
                conversation_id=settlement.key.conversation_id,
                generation=settlement.generation,
                error=repr(error),
            )

    def _settled(self, key: ConversationKey, task: asyncio.Task[None]) -> None:
        settling = self._settling.get(key)
        if settling is not None:
            settling.discard(task)
            if not settling:
                del self._settling[key]

    def _spawn(self, call: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.create_task(call)
        # A task that nobody refers to may be collected while it runs.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
