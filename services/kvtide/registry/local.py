"""The lease registry in this process: the lease table, a clock, and the engines' streams."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from typing import TYPE_CHECKING, Self

from kvtide.registry.domain import LeaseTable
from kvtide.registry.events import (
    Effect,
    EngineReport,
    GrantRefused,
    GrantWaitOver,
    LeaseClaimed,
    LeaseEnded,
    LeaseGranted,
    SendRelease,
)
from kvtide.registry.links import EngineLink
from kvtide.registry.ports import (
    ClaimResult,
    ConversationKey,
    LeasePage,
    LeaseQuery,
    LeaseState,
    LeaseView,
    Settlement,
)
from kvtide.registry.rules import LeaseRules, rules_from_settings
from kvtide.registry.waits import KeyedWaits
from kvtide.runtime.clock import Clock, SystemClock
from kvtide.runtime.errors import InvalidArgument, Unavailable
from kvtide.runtime.log import get_logger
from kvtide.runtime.settings import RegistrySettings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

MIN_GRANT_WAIT_S = 0.001

_log = get_logger(__name__)


class LocalLeaseRegistry:
    """Implements ``LeaseRegistry``, and takes in the engines' streams.

    Everything runs on one event loop, and nothing between reading the clock and
    carrying out the effects awaits anything: that is all the locking there is.
    ``start`` begins to sweep; without it nothing ends by time alone until it is
    looked at, which is how tests with a ``ManualClock`` like it.
    """

    def __init__(
        self,
        settings: RegistrySettings | None = None,
        *,
        rules: LeaseRules | None = None,
        clock: Clock | None = None,
        generation_floor: int | None = None,
    ) -> None:
        """``rules`` default to those of the settings, ``clock`` to the system's.

        ``generation_floor`` defaults to the wall clock in milliseconds: it is an
        id, not a time, and grows from one start of the registry to the next.
        """
        self._settings = settings or RegistrySettings()
        self._clock: Clock = clock or SystemClock()
        self._table = LeaseTable(
            rules or rules_from_settings(self._settings),
            generation_floor=generation_floor or int(time.time() * 1000),
            now_s=self._clock.monotonic_s(),
        )
        self._stream_ids = itertools.count(1)
        self._links: dict[str, EngineLink] = {}
        self._grant_waits: KeyedWaits[ConversationKey] = KeyedWaits()
        self._sweeper: asyncio.Task[None] | None = None
        self._stopped = False

    # ---- life ------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to sweep. Call once, on the loop that will use the registry."""
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep_forever(), name="registry-sweep")

    async def stop(self) -> None:
        """End the engines' streams and all waiting claims; from now on raise ``Unavailable``.

        Call it before stopping the gRPC server, which waits for streams. Harmless twice.
        """
        self._stopped = True
        for link in list(self._links.values()):
            link.close()
        self._grant_waits.wake_all()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
            self._sweeper = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    # ---- LeaseRegistry ---------------------------------------------------------------------

    async def claim(
        self, key: ConversationKey, *, grant_wait_s: float | None = None
    ) -> ClaimResult:
        """See ``LeaseRegistry``."""
        if grant_wait_s is not None and not grant_wait_s >= 0:
            raise InvalidArgument(
                "invalid_grant_wait", f"grant_wait_s must not be negative, got {grant_wait_s}"
            )
        self._require_running()
        if grant_wait_s is None:
            grant_wait_s = self._settings.grant_wait_s
        expected_s = self._table.grant_wait_left_s(key, self._now_s())
        if expected_s > 0:
            await self._grant_waits.wait(key, min(expected_s, max(grant_wait_s, MIN_GRANT_WAIT_S)))
            self._require_running()
        result, effects = self._table.open_turn(key, uuid.uuid4().hex, self._now_s())
        self._carry_out(effects)
        return result

    async def settle(self, settlement: Settlement) -> None:
        """See ``LeaseRegistry``."""
        self._require_running()
        self._carry_out(self._table.settle(settlement, self._now_s()))

    async def close_conversation(self, key: ConversationKey) -> None:
        """See ``LeaseRegistry``."""
        self._require_running()
        self._carry_out(self._table.close(key, self._now_s()))

    async def get_lease(self, key: ConversationKey) -> LeaseView:
        """See ``LeaseRegistry``."""
        self._require_running()
        lease, effects = self._table.get(key, self._now_s())
        self._carry_out(effects)
        return lease

    async def list_leases(self, query: LeaseQuery) -> LeasePage:
        """See ``LeaseRegistry``."""
        self._require_running()
        # One slice only: what a backlog leaves over is at most one sweep out of date.
        effects, _ = self._table.sweep(self._now_s())
        self._carry_out(effects)
        return self._table.list_leases(query, self._now_s())

    # ---- engines ---------------------------------------------------------------------------

    @property
    def inventory_interval_s(self) -> float:
        """How often engines shall send their inventory, in seconds."""
        return self._settings.inventory_interval_s

    @property
    def ignored_events(self) -> Mapping[str, int]:
        """How many events were answered by nothing so far, by name."""
        return self._table.counts

    def attach_engine(self, node_id: str, epoch: str, first: EngineReport) -> EngineLink:
        """A stream of an engine begins, with what its first message reported.

        Replaces an older stream of the same node. Raises ``InvalidArgument`` (bad
        ids), ``FailedPrecondition`` (the epoch was replaced by one that is
        attached) and ``Unavailable`` (stopped).
        """
        self._require_running()
        link = EngineLink(
            node_id,
            epoch,
            next(self._stream_ids),
            on_report=self._report,
            on_close=self._detach,
        )
        effects = self._table.attach(node_id, epoch, link.stream_id, self._now_s())
        replaced = self._links.get(node_id)
        if replaced is not None:
            replaced.end()
        self._links[node_id] = link
        _log.info(
            "engine.attached",
            node_id=node_id,
            epoch=epoch,
            replaced_epoch=replaced.epoch if replaced is not None else None,
            held_leases=None if first.inventory is None else len(first.inventory),
        )
        self._carry_out(effects)
        link.report(first)
        return link

    def _report(self, link: EngineLink, report: EngineReport) -> None:
        self._carry_out(self._table.report(link.node_id, link.stream_id, report, self._now_s()))

    def _detach(self, link: EngineLink) -> None:
        if self._links.get(link.node_id) is link:
            del self._links[link.node_id]
            _log.info("engine.detached", node_id=link.node_id, epoch=link.epoch)
        self._carry_out(self._table.detach(link.node_id, link.stream_id, self._now_s()))

    # ---- time ------------------------------------------------------------------------------

    def sweep_now(self) -> None:
        """Apply everything that time alone has changed until now."""
        more = True
        while more:
            effects, more = self._table.sweep(self._now_s())
            self._carry_out(effects)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.sweep_interval_s)
            more = True
            while more:
                effects, more = self._table.sweep(self._now_s())
                self._carry_out(effects)
                # Between slices everybody else gets a turn on the loop.
                await asyncio.sleep(0)

    def _now_s(self) -> float:
        return self._clock.monotonic_s()

    def _require_running(self) -> None:
        if self._stopped:
            raise Unavailable("registry_stopped", "the lease registry is shutting down")

    # ---- effects ---------------------------------------------------------------------------

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendRelease):
                link = self._links.get(effect.node_id)
                # Without its engine a command is void: it is repeated on the next inventory.
                if link is not None and link.epoch == effect.epoch:
                    link.send_release(effect.request_id)
            elif isinstance(effect, GrantWaitOver):
                self._grant_waits.wake(effect.key)
            else:
                _log_effect(effect)


def _log_effect(effect: LeaseGranted | LeaseClaimed | LeaseEnded | GrantRefused) -> None:
    if isinstance(effect, GrantRefused):
        _log.warning(
            "lease.refused", node_id=effect.node_id, request_id=effect.request_id, why=effect.why
        )
        return
    lease = effect.lease
    log = _log.bind(
        tenant=lease.key.tenant,
        conversation_id=lease.key.conversation_id,
        generation=lease.generation,
        node_id=lease.node_id,
    )
    if isinstance(effect, LeaseGranted):
        log.debug(
            "lease.granted", token_count=lease.token_count, time_left_s=round(lease.time_left_s, 3)
        )
    elif isinstance(effect, LeaseClaimed):
        log.debug(
            "lease.claimed", claim_id=effect.claim_id, claim_left_s=round(effect.claim_left_s, 3)
        )
    else:
        level = log.info if lease.state is LeaseState.LOST else log.debug
        level("lease.ended", state=str(lease.state), reason=str(lease.end_reason or "unasked"))
