"""One lease on record.

    grant               claim                    read reported
   ────────► HELD ────────────────► CLAIMED ────────────────────► CONSUMED
              │ ▲  settled not read    │ │
              │ └──────────────────────┘ │ superseded or closed meanwhile:
      release │   claim deadline passes  │ when the claim ends
              ▼                          │
          RELEASING ◄────────────────────┘
              │ ack
              ▼
          RELEASED      HELD, CLAIMED, RELEASING ── deadline passes ──► EXPIRED
                        HELD, CLAIMED, RELEASING ── epoch changed ────► LOST
                        HELD, CLAIMED ── missing from an inventory ───► LOST

The record is written by ``LeaseBook`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtide.registry.due import NEVER_S
from kvtide.registry.ports import ConversationKey, EndReason, LeaseState, LeaseView

if TYPE_CHECKING:
    from kvtide.connector.fingerprint import Fingerprint
    from kvtide.connector.handle import KvHandle


@dataclass(frozen=True, slots=True)
class Pinned:
    """What a reader of a live lease needs."""

    handle: KvHandle
    fingerprint: Fingerprint
    engine_deadline_s: float
    """The lease's deadline, in seconds of the engine's own clock. The engine frees
    the blocks a grace period later."""
    ttl_s: float


@dataclass(slots=True, eq=False)
class Claim:
    """One turn's hold on a lease."""

    claim_id: str
    deadline_s: float
    """By the registry's clock; never later than the lease's own deadline."""


@dataclass(slots=True, eq=False)
class Lease:
    """One lease, with everything that its next transition depends on.

    Times are moments of the registry's clock, in seconds.
    """

    serial: int
    """Order of arrival; also the order of listings."""
    key: ConversationKey
    generation: int
    node_id: str
    epoch: str
    request_id: str
    pinned: Pinned | None
    """None once ended: the blocks are gone, and this is what takes memory."""
    token_count: int
    block_count: int
    deadline_s: float
    claimable_from_s: float
    """Neither offered nor released before this moment: a claim of another registry
    may stand on it until then, see ``LeaseRules.restored_wait_s``."""
    state: LeaseState = LeaseState.HELD
    end_reason: EndReason | None = None
    pending_release: EndReason | None = None
    """Why it is to be released as soon as nobody can be reading it."""
    claim: Claim | None = None
    claim_ids: list[str] = field(default_factory=list)
    """Every claim that there ever was; a read under any of them consumes it."""
    last_claim_deadline_s: float = 0.0
    ended_at_s: float = NEVER_S
    filed_due_s: float = NEVER_S

    @property
    def ended(self) -> bool:
        """Whether it can never be read again."""
        return self.state.ended

    def next_due_s(self, keep_ended_s: float) -> float:
        """When time alone changes it next.

        An ended lease stays on record at least until its last claim would have
        run out: while a reader may be at work, a repeated grant must be
        recognised and not be offered as if it were new.
        """
        if self.ended:
            return max(self.ended_at_s + keep_ended_s, self.last_claim_deadline_s)
        if self.claim is not None:
            return self.claim.deadline_s
        if self.pending_release is not None:
            return min(self.deadline_s, self.claimable_from_s)
        return self.deadline_s

    def view(self, now_s: float) -> LeaseView:
        """What people and tools get to see of it."""
        return LeaseView(
            key=self.key,
            generation=self.generation,
            node_id=self.node_id,
            epoch=self.epoch,
            state=self.state,
            end_reason=self.end_reason,
            token_count=self.token_count,
            block_count=self.block_count,
            time_left_s=0.0 if self.ended else max(0.0, self.deadline_s - now_s),
        )
