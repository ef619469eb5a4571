"""What goes into the lease table from engines, and what comes out of it.

All of it is plain values. The table returns *effects*, facts and commands in the
order in which they happened; whoever drives it carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtide.connector.fingerprint import Fingerprint
    from kvtide.connector.handle import KvHandle
    from kvtide.registry.ports import ConversationKey, LeaseView


@dataclass(frozen=True, slots=True)
class Grant:
    """An engine's word that it pins the blocks of one finished turn."""

    key: ConversationKey
    generation: int
    handle: KvHandle
    """Its ``engine_clock_expiry_s`` is when the engine frees the blocks, by its own
    clock: a grace period after ``time_left_s`` has run out."""
    fingerprint: Fingerprint
    time_left_s: float
    """How long readers may still start, in seconds from the engine's sending."""
    ttl_s: float
    """The whole retention that was granted, in seconds."""


class EndCause(StrEnum):
    """Why an engine freed the blocks of a lease."""

    READ = "read"
    EXPIRED = "expired"
    RELEASED = "released"
    UNKNOWN = "unknown"
    """A cause that this version does not know; the blocks are gone all the same."""


@dataclass(frozen=True, slots=True)
class Ended:
    """An engine's word that it freed the blocks of one lease."""

    request_id: str
    cause: EndCause


@dataclass(frozen=True, slots=True)
class RefusedGrant:
    """A grant, or an entry of an inventory, that cannot be a lease."""

    request_id: str
    why: str


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One message of an engine: grants first, then ends, then the inventory.

    That order matters: a lease that was granted and ended since the message
    before is in the first two and missing from the third.
    """

    grants: tuple[Grant, ...] = ()
    ended: tuple[Ended, ...] = ()
    inventory: tuple[Grant, ...] | None = None
    """Everything that the engine pins for conversations now; None: not said."""
    refused: tuple[RefusedGrant, ...] = ()
    """Malformed grants and inventory entries, already taken out of the others."""


@dataclass(frozen=True, slots=True)
class SendRelease:
    """Ask the engine to free one lease now, if it is attached.

    Losing it is harmless: it is repeated when the engine reports the lease again.
    """

    node_id: str
    epoch: str
    request_id: str


@dataclass(frozen=True, slots=True)
class GrantWaitOver:
    """The grant that claims of this conversation wait for came, or never will."""

    key: ConversationKey


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    """A lease is on record that was not before."""

    lease: LeaseView


@dataclass(frozen=True, slots=True)
class LeaseClaimed:
    """A turn has the exclusive right to read a lease."""

    lease: LeaseView
    claim_id: str
    claim_left_s: float


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A lease ended; ``lease.state`` and ``lease.end_reason`` say how."""

    lease: LeaseView


@dataclass(frozen=True, slots=True)
class GrantRefused:
    """An engine granted what cannot be a lease; it is told to free it."""

    node_id: str
    request_id: str
    why: str


Effect = SendRelease | GrantWaitOver | LeaseGranted | LeaseClaimed | LeaseEnded | GrantRefused
