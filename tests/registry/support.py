"""Grants and a lease table driven by hand, for the tests of the registry."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from kvtide.connector.fingerprint import fingerprint_of
from kvtide.connector.handle import KvHandle
from kvtide.connector.pins import PIN_GRACE_S
from kvtide.registry.domain import LeaseTable
from kvtide.registry.events import EndCause, Ended, EngineReport, Grant, LeaseEnded, SendRelease
from kvtide.registry.ports import ConversationKey, ReadOutcome, Settlement
from kvtide.registry.rules import LeaseRules

if TYPE_CHECKING:
    from kvtide.registry.events import Effect
    from kvtide.registry.ports import ClaimResult, LeaseView

BLOCK_SIZE_TOKENS = 16
TOKENS = tuple(range(40))
FINGERPRINT = fingerprint_of(TOKENS, BLOCK_SIZE_TOKENS)
KEY = ConversationKey("tenant-a", "conversation-1")
NODE, EPOCH = "decode-1", "epoch-a"
FLOOR = 1_000
RULES = LeaseRules()
TTL_S = 480.0
ENGINE_OFFSET_S = 7_200.0
"""By how much the engines' clocks are ahead of the registry's: hours, and nobody may care."""


def make_grant(
    key: ConversationKey,
    generation: int,
    request_id: str,
    *,
    epoch: str = EPOCH,
    now_s: float = 0.0,
    time_left_s: float = TTL_S,
    expiry_s: float | str | None = "fits",
) -> Grant:
    """A grant as the engine of `epoch` sends it at `now_s` of the registry's clock."""
    if isinstance(expiry_s, str):
        expiry_s = now_s + time_left_s + PIN_GRACE_S + ENGINE_OFFSET_S
    handle = KvHandle(
        engine_id=epoch,
        request_id=request_id,
        side_channel_host="127.0.0.1",
        side_channel_port=5600,
        block_groups=((4, 5, 9),),
        token_count=len(TOKENS),
        block_size_tokens=BLOCK_SIZE_TOKENS,
        engine_clock_expiry_s=expiry_s,
    )
    return Grant(key, generation, handle, FINGERPRINT, time_left_s, TTL_S)


class Driver:
    """A lease table with a clock that the test moves, and a record of its effects."""

    def __init__(self, rules: LeaseRules = RULES, *, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self.table = LeaseTable(rules, generation_floor=FLOOR, now_s=now_s)
        self.effects: list[Effect] = []
        self._ids = itertools.count(1)
        self._streams: dict[tuple[str, str], int] = {}

    # ---- engines

    def attach(
        self, node: str = NODE, epoch: str = EPOCH, inventory: list[Grant] | None = None
    ) -> int:
        stream = next(self._ids)
        self._note(self.table.attach(node, epoch, stream, self.now_s))
        self._streams[node, epoch] = stream
        self.report(EngineReport(inventory=tuple(inventory or ())), node=node, stream=stream)
        return stream

    def detach(self, node: str = NODE, epoch: str = EPOCH, stream: int | None = None) -> None:
        self._note(self.table.detach(node, stream or self._streams[node, epoch], self.now_s))

    def report(
        self,
        report: EngineReport,
        *,
        node: str = NODE,
        epoch: str = EPOCH,
        stream: int | None = None,
    ) -> None:
        stream = stream or self._streams[node, epoch]
        self._note(self.table.report(node, stream, report, self.now_s))

    def grant(
        self,
        generation: int,
        request_id: str = "",
        *,
        key: ConversationKey = KEY,
        node: str = NODE,
        epoch: str = EPOCH,
        time_left_s: float = TTL_S,
    ) -> Grant:
        grant = make_grant(
            key,
            generation,
            request_id or f"request-{generation}",
            epoch=epoch,
            now_s=self.now_s,
            time_left_s=time_left_s,
        )
        self.report(EngineReport(grants=(grant,)), node=node, epoch=epoch)
        return grant

    def inventory(self, *grants: Grant, node: str = NODE, epoch: str = EPOCH) -> None:
        self.report(EngineReport(inventory=grants), node=node, epoch=epoch)

    def ended(self, request_id: str, cause: EndCause, *, epoch: str = EPOCH) -> None:
        self.report(EngineReport(ended=(Ended(request_id, cause),)), epoch=epoch)

    # ---- turns

    def open(self, key: ConversationKey = KEY) -> ClaimResult:
        result, effects = self.table.open_turn(key, f"claim-{next(self._ids)}", self.now_s)
        self._note(effects)
        return result

    def settle(
        self,
        result: ClaimResult,
        outcome: ReadOutcome = ReadOutcome.UNSPECIFIED,
        *,
        key: ConversationKey = KEY,
        grant_expected: bool = False,
    ) -> None:
        claim_id = result.claimed.claim_id if result.claimed is not None else ""
        settlement = Settlement(key, result.generation, claim_id, outcome, grant_expected)
        self._note(self.table.settle(settlement, self.now_s))

    def close(self, key: ConversationKey = KEY) -> None:
        self._note(self.table.close(key, self.now_s))

    def held(self, *, time_left_s: float = TTL_S) -> Grant:
        """Attach an engine, open a turn, and have its lease granted."""
        self.attach()
        return self.grant(self.open().generation, time_left_s=time_left_s)

    # ---- time and views

    def advance(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.sweep()

    def sweep(self) -> None:
        more = True
        while more:
            effects, more = self.table.sweep(self.now_s)
            self._note(effects)

    def lease(self, key: ConversationKey = KEY) -> LeaseView:
        lease, effects = self.table.get(key, self.now_s)
        self._note(effects)
        return lease

    def _note(self, effects: list[Effect]) -> None:
        self.effects.extend(effects)

    def releases(self) -> list[str]:
        """Request ids of all release commands so far."""
        return [effect.request_id for effect in self.effects if isinstance(effect, SendRelease)]

    def ends(self) -> list[LeaseView]:
        """All leases that ended so far, as they were then."""
        return [effect.lease for effect in self.effects if isinstance(effect, LeaseEnded)]
