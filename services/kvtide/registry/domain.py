"""The lease table: which turn may read which lease.

Plain decisions. Time and ids come in as arguments, effects go out as values;
there is no I/O, no lock and no clock in here. ``LeaseBook`` holds the state machine of
one lease, ``EngineTable`` says who speaks for a node, and this class
decides what a conversation's turns, grants and end mean for its leases.

Orderings (each is tested by name; those of a single lease are in ``book``)

* Turns fence. Each turn opened has a greater generation than every earlier one.
  A grant older than the newest grant, or of a turn opened before its
  conversation was closed, is put on record only to be released.
* The newest grant of a conversation is its lease. The one before is released: at
  once if HELD, when its claim ends if CLAIMED.
* A grant may come before the settle that announces it, or after; it may come twice.
* Nothing is offered from an engine that has no stream, and nothing of an epoch
  that was replaced.
* What another registry may have let somebody read is neither offered nor released
  before that reader's claim has certainly run out. An inventory alone cannot tell whether
  a lease is being read (the engine notices only the end of a read), so after a
  restart such leases wait; leases of turns that this table opened do not.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvtide.registry.book import LeaseBook
from kvtide.registry.conversation import Conversation
from kvtide.registry.due import DueQueue, Filed
from kvtide.registry.engines import Engine, EngineTable
from kvtide.registry.events import (
    Effect,
    EndCause,
    Ended,
    EngineReport,
    Grant,
    GrantRefused,
    GrantWaitOver,
    SendRelease,
)
from kvtide.registry.lease import Lease
from kvtide.registry.listing import page_of_leases
from kvtide.registry.ports import (
    ClaimResult,
    ConversationKey,
    EndReason,
    LeasePage,
    LeaseQuery,
    LeaseState,
    LeaseView,
    MissReason,
    ReadOutcome,
    Settlement,
    require_id,
)
from kvtide.runtime.errors import InvalidArgument, NotFound

if TYPE_CHECKING:
    from kvtide.registry.rules import LeaseRules

MAX_GENERATION = 2**62
"""Generations are int64 on the wire; this leaves room to count on."""
SWEEP_SLICE = 500
"""Leases looked at in one go: a few milliseconds, in which nobody else is served."""


class LeaseTable:
    """All conversations, leases and engines of one registry.

    ``generation_floor`` is greater than every generation that an earlier
    registry opened; it also tells this registry's turns from theirs.
    """

    def __init__(self, rules: LeaseRules, *, generation_floor: int = 1, now_s: float = 0.0) -> None:
        if not 1 <= generation_floor <= MAX_GENERATION:
            raise InvalidArgument(
                "invalid_generation",
                f"generation_floor must be 1 to 2**62, got {generation_floor}",
            )
        self.rules = rules
        self.counts: Counter[str] = Counter()
        """Events that were answered by nothing, by name."""
        self._first_generation = generation_floor
        self._generation_floor = generation_floor
        self._restored_from_s = now_s + rules.restored_wait_s
        self._conversations: dict[ConversationKey, Conversation] = {}
        self._effects: list[Effect] = []
        self._due: DueQueue[Filed] = DueQueue()
        self._engines = EngineTable()
        self._book = LeaseBook(rules, self._due, self._effects)

    # ---- turns -----------------------------------------------------------------------------

    def open_turn(
        self, key: ConversationKey, claim_id: str, now_s: float
    ) -> tuple[ClaimResult, list[Effect]]:
        """Open the next turn; claim the conversation's lease for it, if one is readable.

        ``claim_id`` is unique for ever; it is used only if there is a claim.
        """
        conversation = self._conversation(key, now_s)
        generation = max(conversation.last_generation + 1, self._generation_floor)
        conversation.last_generation = conversation.opened_generation = generation
        lease = conversation.lease
        if lease is not None:
            self._book.pass_time(lease, now_s)
        miss = self._miss_reason(lease, now_s)
        if miss is not None or lease is None:
            return ClaimResult(generation, None, miss or MissReason.NO_LEASE), self._take_effects()
        claimed = self._book.claim(lease, claim_id, now_s)
        return ClaimResult(generation, claimed), self._take_effects()

    def _miss_reason(self, lease: Lease | None, now_s: float) -> MissReason | None:
        if lease is None or lease.ended or lease.state is LeaseState.RELEASING:
            return MissReason.NO_LEASE
        if lease.state is LeaseState.CLAIMED or now_s < lease.claimable_from_s:
            return MissReason.IN_USE
        if not self._engines.is_attached(lease.node_id, lease.epoch):
            return MissReason.ENGINE_DETACHED
        if lease.deadline_s - now_s < self.rules.claim_min_left_s:
            return MissReason.TOO_LITTLE_TIME
        return None

    def grant_wait_left_s(self, key: ConversationKey, now_s: float) -> float:
        """How long a claim may still expect a grant that is on its way; 0: there is none."""
        conversation = self._conversations.get(key)
        if conversation is None or not conversation.awaited_generation:
            return 0.0
        return max(0.0, conversation.awaited_until_s - now_s)

    def settle(self, settlement: Settlement, now_s: float) -> list[Effect]:
        """Take in how a turn ended. Raises ``InvalidArgument`` for an impossible generation."""
        if not 1 <= settlement.generation <= MAX_GENERATION:
            raise InvalidArgument(
                "invalid_generation",
                f"generation must be 1 to 2**62, got {settlement.generation}",
            )
        lease = self._book.find_claim(settlement.claim_id)
        if lease is not None and lease.key == settlement.key:
            self._settle_claim(lease, settlement, now_s)
        if settlement.grant_expected:
            self._expect_grant(settlement, now_s)
        return self._take_effects()

    def _settle_claim(self, lease: Lease, settlement: Settlement, now_s: float) -> None:
        self._book.pass_time(lease, now_s)
        stands = lease.claim is not None and lease.claim.claim_id == settlement.claim_id
        if settlement.read_outcome is ReadOutcome.READ:
            self._book.end(lease, LeaseState.CONSUMED, EndReason.CONSUMED, now_s)
        elif settlement.read_outcome is ReadOutcome.NOT_READ and stands:
            self._book.end_claim(lease, now_s)

    def _expect_grant(self, settlement: Settlement, now_s: float) -> None:
        conversation = self._conversation(settlement.key, now_s)
        # A turn that another registry opened counts as opened from here on.
        conversation.last_generation = max(conversation.last_generation, settlement.generation)
        here_or_never = max(conversation.granted_generation, conversation.closed_generation)
        if settlement.generation > max(here_or_never, conversation.awaited_generation):
            conversation.awaited_generation = settlement.generation
            conversation.awaited_until_s = now_s + self.rules.grant_wait_limit_s

    def close(self, key: ConversationKey, now_s: float) -> list[Effect]:
        """End a conversation; every grant of a turn opened before this is released."""
        conversation = self._conversation(key, now_s)
        conversation.last_generation = max(conversation.last_generation, self._generation_floor - 1)
        conversation.closed_generation = conversation.last_generation
        if conversation.lease is not None:
            self._book.pass_time(conversation.lease, now_s)
            self._book.release(conversation.lease, EndReason.CLOSED, now_s)
        self._stop_waiting(conversation, conversation.closed_generation)
        return self._take_effects()

    # ---- views -----------------------------------------------------------------------------

    def get(self, key: ConversationKey, now_s: float) -> tuple[LeaseView, list[Effect]]:
        """The newest lease of a conversation, as it is now. Raises ``NotFound``."""
        conversation = self._conversations.get(key)
        if conversation is None or conversation.lease is None:
            raise NotFound(
                "no_lease",
                f"conversation {key.conversation_id!r} of tenant {key.tenant!r} "
                "has no lease on record",
            )
        self._book.pass_time(conversation.lease, now_s)
        return conversation.lease.view(now_s), self._take_effects()

    def list_leases(self, query: LeaseQuery, now_s: float) -> LeasePage:
        """One page of leases, as of the last sweep. Raises ``InvalidArgument``."""
        return page_of_leases(
            self._book.by_serial, query, table_id=str(self._first_generation), now_s=now_s
        )

    # ---- engines ---------------------------------------------------------------------------

    def attach(self, node_id: str, epoch: str, stream_id: int, now_s: float) -> list[Effect]:
        """A stream speaks for a node from now on. All leases of an older epoch are lost.

        ``stream_id`` is unique for ever. Raises ``InvalidArgument`` for bad
        ids and ``FailedPrecondition`` for a stream of a replaced epoch.
        """
        require_id("node_id", node_id)
        require_id("epoch", epoch)
        engine, replaced = self._engines.attach(node_id, epoch, stream_id, now_s)
        self._due.file(engine, now_s + self.rules.idle_keep_s)
        if replaced is not None:
            for lease in self._book.of_engine(node_id, replaced):
                self._book.pass_time(lease, now_s)
                self._book.end(lease, LeaseState.LOST, EndReason.ENGINE_RESTARTED, now_s)
        return self._take_effects()

    def detach(self, node_id: str, stream_id: int, now_s: float) -> list[Effect]:
        """A stream ended: the engine's leases stay, and are not offered until it is back."""
        engine = self._engines.speaks(node_id, stream_id)
        if engine is not None:
            engine.stream_id = None
            engine.last_seen_s = now_s
        return self._take_effects()

    def report(
        self, node_id: str, stream_id: int, report: EngineReport, now_s: float
    ) -> list[Effect]:
        """Take in one message of an engine. One from a replaced stream is ignored."""
        engine = self._engines.speaks(node_id, stream_id)
        if engine is None:
            self.counts["report_from_replaced_stream"] += 1
            return []
        for grant in report.grants:
            self._grant(engine, grant, now_s, restored=False)
        for ended in report.ended:
            self._ended(engine, ended, now_s)
        if report.inventory is not None:
            self._inventory(engine, report, now_s)
        for refused in report.refused:
            # A lease on record may have a reader: its own rules say when it is released.
            if self._book.find(engine.node_id, engine.epoch, refused.request_id) is None:
                self._refuse(engine, refused.request_id, refused.why)
        return self._take_effects()

    def _inventory(self, engine: Engine, report: EngineReport, now_s: float) -> None:
        inventory = report.inventory or ()
        held = {grant.handle.request_id for grant in inventory}
        held.update(refused.request_id for refused in report.refused)
        for lease in self._book.of_engine(engine.node_id, engine.epoch):
            self._book.pass_time(lease, now_s)
            if lease.request_id in held:
                continue
            if lease.state is LeaseState.RELEASING:
                # Its acknowledgement got lost with a stream.
                self._book.end(lease, LeaseState.RELEASED, lease.end_reason, now_s)
            else:
                self._book.end(lease, LeaseState.LOST, EndReason.NOT_IN_INVENTORY, now_s)
        for grant in inventory:
            self._grant(engine, grant, now_s, restored=True)

    def _grant(self, engine: Engine, grant: Grant, now_s: float, *, restored: bool) -> None:
        handle = grant.handle
        known = self._book.find(engine.node_id, engine.epoch, handle.request_id)
        if known is not None:
            self._grant_again(known, grant, now_s)
            return
        why = _why_refused(engine, grant)
        if why is not None:
            self._refuse(engine, handle.request_id, why)
            waiting = self._conversations.get(grant.key)
            if waiting is not None:
                self._stop_waiting(waiting, grant.generation)
            return
        conversation = self._conversation(grant.key, now_s)
        conversation.last_generation = max(conversation.last_generation, grant.generation)
        opened_here = self._first_generation <= grant.generation <= conversation.opened_generation
        claimable_from_s = self._restored_from_s if restored and not opened_here else now_s
        lease = self._book.add(engine.node_id, grant, claimable_from_s, now_s)
        if grant.generation <= conversation.closed_generation:
            self._book.release(lease, EndReason.CLOSED, now_s)
        elif grant.generation < conversation.granted_generation:
            self._book.release(lease, EndReason.SUPERSEDED, now_s)
        else:
            if conversation.lease is not None:
                self._book.pass_time(conversation.lease, now_s)
                self._book.release(conversation.lease, EndReason.SUPERSEDED, now_s)
            conversation.lease = lease
            conversation.granted_generation = grant.generation
        self._stop_waiting(conversation, grant.generation)

    def _grant_again(self, lease: Lease, grant: Grant, now_s: float) -> None:
        if lease.key != grant.key or lease.generation != grant.generation:
            self.counts["grant_contradicts_record"] += 1
            return
        self._book.pass_time(lease, now_s)
        if not lease.ended:
            self._book.refresh(lease, grant, now_s)
            self._book.pass_time(lease, now_s)
        if lease.state in (LeaseState.RELEASING, LeaseState.CONSUMED, LeaseState.RELEASED):
            # Nobody reads it any more and the engine still pins it. Not so for EXPIRED and
            # LOST: a transfer may be running into the grace period, which ends by itself.
            self._book.send_release(lease)

    def _ended(self, engine: Engine, ended: Ended, now_s: float) -> None:
        lease = self._book.find(engine.node_id, engine.epoch, ended.request_id)
        if lease is None or lease.ended:
            self.counts["ended_unknown_lease" if lease is None else "ended_again"] += 1
            return
        # The engine knows better than the clock how it ended, so no time is applied first.
        if ended.cause is EndCause.READ:
            self._book.end(lease, LeaseState.CONSUMED, EndReason.CONSUMED, now_s)
        elif ended.cause is EndCause.EXPIRED:
            self._book.end(lease, LeaseState.EXPIRED, EndReason.EXPIRED, now_s)
        elif ended.cause is EndCause.RELEASED:
            self._book.end(
                lease, LeaseState.RELEASED, lease.end_reason or lease.pending_release, now_s
            )
        else:
            self._book.end(lease, LeaseState.LOST, None, now_s)

    def _refuse(self, engine: Engine, request_id: str, why: str) -> None:
        self.counts["grant_refused"] += 1
        self._effects.append(GrantRefused(engine.node_id, request_id, why))
        if request_id:
            self._effects.append(SendRelease(engine.node_id, engine.epoch, request_id))

    # ---- time ------------------------------------------------------------------------------

    def sweep(self, now_s: float, limit: int = SWEEP_SLICE) -> tuple[list[Effect], bool]:
        """Look at what is due, at most ``limit`` things; True if more is due now."""
        for _ in range(limit):
            item = self._due.pop_due(now_s)
            if item is None:
                return self._take_effects(), False
            if isinstance(item, Lease):
                if self._book.look_at(item, now_s):
                    conversation = self._conversations.get(item.key)
                    if conversation is not None and conversation.lease is item:
                        conversation.lease = None
            elif isinstance(item, Conversation):
                self._look_at_conversation(item, now_s)
            elif isinstance(item, Engine):
                self._look_at_engine(item, now_s)
        return self._take_effects(), True

    def _look_at_conversation(self, conversation: Conversation, now_s: float) -> None:
        due_s = conversation.last_used_s + self.rules.idle_keep_s
        if due_s <= now_s and conversation.lease is None:
            del self._conversations[conversation.key]
            # What is forgotten must still not be issued again.
            self._generation_floor = max(self._generation_floor, conversation.last_generation + 1)
            return
        self._due.file(conversation, due_s if due_s > now_s else now_s + self.rules.idle_keep_s)

    def _look_at_engine(self, engine: Engine, now_s: float) -> None:
        due_s = engine.last_seen_s + self.rules.idle_keep_s
        gone = engine.stream_id is None and not self._book.has_leases(engine.node_id, engine.epoch)
        if due_s <= now_s and gone:
            self._engines.forget(engine)
            return
        self._due.file(engine, due_s if due_s > now_s else now_s + self.rules.idle_keep_s)

    # ---- helpers ---------------------------------------------------------------------------

    def _conversation(self, key: ConversationKey, now_s: float) -> Conversation:
        conversation = self._conversations.get(key)
        if conversation is None:
            conversation = self._conversations[key] = Conversation(key)
        conversation.last_used_s = now_s
        self._due.file(conversation, now_s + self.rules.idle_keep_s)
        return conversation

    def _stop_waiting(self, conversation: Conversation, generation: int) -> None:
        """No grant up to this generation is waited for any more."""
        if 0 < conversation.awaited_generation <= generation:
            conversation.awaited_generation = 0
            self._effects.append(GrantWaitOver(conversation.key))

    def _take_effects(self) -> list[Effect]:
        taken = self._effects.copy()
        self._effects.clear()
        return taken


def _why_refused(engine: Engine, grant: Grant) -> str | None:
    handle = grant.handle
    if handle.engine_id != engine.epoch:
        return f"its handle is of engine {handle.engine_id!r}, not of epoch {engine.epoch!r}"
    if handle.engine_clock_expiry_s is None:
        return "its handle has no engine_clock_expiry_s, so a reader could not check it"
    if not handle.token_count or not handle.block_count:
        return "its handle points at nothing"
    if not 1 <= grant.generation <= MAX_GENERATION:
        return f"its generation {grant.generation} is not 1 to 2**62"
    return None
