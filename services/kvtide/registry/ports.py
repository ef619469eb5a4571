"""What the block-lease registry offers, and the values that travel through it.

A *turn* is one request of a conversation. A *lease* is the right to read the
KV blocks that one turn left on one decode engine. A *claim* is one later turn's
exclusive, single-use hold on a lease.

Everything here is plain Python. ``LocalLeaseRegistry`` and
``GrpcLeaseRegistry`` implement ``LeaseRegistry``, and a caller cannot tell
which one it has. All times are durations in seconds, counted from the moment
the value was made: no absolute time leaves the process that owns its clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from kvtide.runtime.errors import InvalidArgument

if TYPE_CHECKING:
    from kvtide.connector.fingerprint import Fingerprint
    from kvtide.connector.handle import KvHandle

MAX_ID_CHARS = 256


def require_id(field: str, value: str) -> None:
    """Raise ``InvalidArgument`` unless ``value`` has 1 to 256 characters."""
    if not 1 <= len(value) <= MAX_ID_CHARS:
        raise InvalidArgument(
            "invalid_id",
            f"{field} must have 1 to {MAX_ID_CHARS} characters, got {len(value)}",
        )


@dataclass(frozen=True, slots=True)
class ConversationKey:
    """A conversation, namespaced by tenant.

    Raises ``InvalidArgument`` when a field is empty or longer than 256
    characters, so that a key, once made, is a valid one.
    """

    tenant: str
    conversation_id: str

    def __post_init__(self) -> None:
        require_id("tenant", self.tenant)
        require_id("conversation_id", self.conversation_id)


class LeaseState(StrEnum):
    """Where a lease stands; the last four are final."""

    HELD = "held"
    """Pinned on the engine, free to be claimed."""
    CLAIMED = "claimed"
    """One turn has the exclusive right to read it."""
    RELEASING = "releasing"
    """The registry asked the engine to free it and waits for the answer."""
    CONSUMED = "consumed"
    """Read by a prefill engine; the engine freed it."""
    RELEASED = "released"
    """Freed on request."""
    EXPIRED = "expired"
    """Ran out; the engine frees it by itself."""
    LOST = "lost"
    """The engine restarted, or no longer knows it."""

    @property
    def ended(self) -> bool:
        """Whether the lease is over and can never be read again."""
        return self in _FINAL_STATES


_FINAL_STATES = frozenset(
    {LeaseState.CONSUMED, LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.LOST}
)


class EndReason(StrEnum):
    """Why a lease is being released, or ended."""

    CONSUMED = "consumed"
    EXPIRED = "expired"
    SUPERSEDED = "superseded"
    """A newer turn of the conversation has its own lease."""
    CLOSED = "closed"
    """The conversation was closed."""
    ENGINE_RESTARTED = "engine_restarted"
    """The node attached with a new epoch."""
    NOT_IN_INVENTORY = "not_in_inventory"
    """The engine reported what it holds and this was not in it."""


class MissReason(StrEnum):
    """Why a claim got no lease."""

    NO_LEASE = "no_lease"
    """Nothing is readable: none was granted, it ended, or it is being freed."""
    IN_USE = "in_use"
    """Another turn has claimed it."""
    TOO_LITTLE_TIME = "too_little_time"
    """It would run out before a queued transfer could finish."""
    ENGINE_DETACHED = "engine_detached"
    """The engine that holds it has no stream to the registry now."""


class ReadOutcome(StrEnum):
    """What became of the read that a claim allowed."""

    UNSPECIFIED = "unspecified"
    """Leaves the claim as it is."""
    READ = "read"
    """A read finished (or prefill had it all and told decode to free)."""
    NOT_READ = "not_read"
    """Certainly nothing was read, nor ever will be, under this claim."""
    UNKNOWN = "unknown"
    """Cannot be told (abort, crash)."""


@dataclass(frozen=True, slots=True)
class ClaimedLease:
    """The exclusive, single-use right to read one lease, for one turn."""

    claim_id: str
    node_id: str
    handle: KvHandle
    """Its ``engine_clock_expiry_s`` is never later than the claim's deadline."""
    fingerprint: Fingerprint
    generation: int
    """Generation of the turn whose blocks these are."""
    claim_time_left_s: float
    """How long the claim stands, in seconds from when this value was made."""
    ttl_s: float
    """The whole retention that the engine granted, in seconds; for reports."""


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """What ``LeaseRegistry.claim`` answers."""

    generation: int
    """Generation of the turn that the call opened; the decode engine's grant
    must carry it. Greater than every earlier one of the conversation."""
    claimed: ClaimedLease | None
    miss_reason: str = ""
    """A ``MissReason`` when nothing was claimed, else empty."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a turn ended."""

    key: ConversationKey
    generation: int
    """The generation that ``claim`` opened."""
    claim_id: str = ""
    """Empty when ``claim`` answered without a lease."""
    read_outcome: ReadOutcome = ReadOutcome.UNSPECIFIED
    """Ignored without ``claim_id``."""
    grant_expected: bool = False
    """The decode leg finished normally, so the grant of this generation is on
    its way, or here already."""


@dataclass(frozen=True, slots=True)
class LeaseView:
    """One lease as it is on record, for people and tools."""

    key: ConversationKey
    generation: int
    node_id: str
    epoch: str
    """The engine start that holds the blocks (``KvHandle.engine_id``)."""
    state: LeaseState
    end_reason: EndReason | None
    """Set once the lease is being released, or has ended; None too when the
    engine freed it without being asked by this registry."""
    token_count: int
    block_count: int
    """Blocks pinned, over all KV cache groups."""
    time_left_s: float
    """Time left by the registry's clock, in seconds; 0 once ended."""


@dataclass(frozen=True, slots=True)
class LeaseQuery:
    """Which leases to list; empty fields do not filter."""

    node_id: str = ""
    tenant: str = ""
    state: LeaseState | None = None
    page_size: int = 0
    """0: the default (100). Larger than 1000 is cut to 1000."""
    page_token: str = ""
    """``LeasePage.next_page_token`` of the page before, with the same filters."""


@dataclass(frozen=True, slots=True)
class LeasePage:
    """One page of leases, newest grant first."""

    leases: tuple[LeaseView, ...]
    next_page_token: str = ""
    """Empty on the last page."""


class LeaseRegistry(Protocol):
    """The one authority on who may read which turn's blocks, until when.

    It is an authority over *readers* only: the decode engine frees its blocks
    on its own clock, whatever happens here, so losing the registry can cost a
    recompute and never a wrong answer or a leaked pin.

    Every method raises ``Unavailable`` when the registry cannot be reached (or
    its subclass ``DeadlineExceeded`` when it does not answer in time). A
    cancelled call happened in full or not at all; over a network the caller
    cannot know which, and a claim that nobody knows of ends by its deadline.
    """

    async def claim(
        self, key: ConversationKey, *, grant_wait_s: float | None = None
    ) -> ClaimResult:
        """Open the next turn of a conversation, and claim its lease if it has one.

        Not idempotent: each call opens a turn of its own. When the turn before
        was settled with ``grant_expected`` and its grant has not arrived, the
        call waits for it: at most ``grant_wait_s`` seconds (None: the
        registry's own limit, which also caps it; sub-millisecond values count
        as one millisecond). The absence of a lease is not an error, see
        ``ClaimResult.miss_reason``.

        Raises ``InvalidArgument`` when ``grant_wait_s`` is negative.
        """
        ...

    async def settle(self, settlement: Settlement) -> None:
        """Report how a turn ended.

        Idempotent. An unknown claim changes nothing; a claim that has run out
        still counts when it says that the read happened. Raises
        ``InvalidArgument`` when the generation is not positive.
        """
        ...

    async def close_conversation(self, key: ConversationKey) -> None:
        """End a conversation.

        Its lease is released on the engine as soon as no claim is open on it, and
        grants of turns already opened are released on arrival. A later ``claim``
        starts the conversation anew. Idempotent.
        """
        ...

    async def get_lease(self, key: ConversationKey) -> LeaseView:
        """The newest lease on record of a conversation, ended ones included.

        Raises ``NotFound`` when it has none.
        """
        ...

    async def list_leases(self, query: LeaseQuery) -> LeasePage:
        """Leases on record, newest grant first.

        Pages are stable: a lease that is on record all through the listing, and
        matches all through it, comes exactly once. Raises ``InvalidArgument``
        for a page token that was not handed out for these filters, or a
        negative page size.
        """
        ...
