"""The times that the lease rules are made of, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtide.connector.pins import PIN_GRACE_S

if TYPE_CHECKING:
    from kvtide.runtime.settings import RegistrySettings

IDLE_KEEP_S = 3600.0


@dataclass(frozen=True, slots=True)
class LeaseRules:
    """How long things last, in seconds. The defaults are those of the settings."""

    claim_min_left_s: float = 10.0
    """A lease with less time left than this is not offered: a queued prefill
    and its transfer would not fit."""
    claim_limit_s: float = 60.0
    """Longest time that one claim stands."""
    pin_grace_s: float = PIN_GRACE_S
    """How much later than the lease's deadline engines free the blocks, which is
    what the expiry in their handles says. Readers get it taken off: prefill
    engines start no read in the last seconds before the expiry that they are
    given, so with it a read could begin as its claim ends, and the next
    claim would let a second reader in before the first one is done."""
    grant_wait_limit_s: float = 0.5
    """From when a turn was settled, how long its grant counts as on its way."""
    keep_ended_s: float = 60.0
    """How long an ended lease stays on record."""
    idle_keep_s: float = IDLE_KEEP_S
    """How long a conversation without a lease, or a detached engine without
    leases, is remembered."""
    restored_wait_s: float = 60.0
    """From the start of the registry, how long leases that another registry
    may have let somebody read are neither offered nor released. At least the ``claim_limit_s``
    of that registry; 0 only where no two turns of a conversation ever overlap."""


def rules_from_settings(settings: RegistrySettings) -> LeaseRules:
    """The rules that the settings ask for."""
    return LeaseRules(
        claim_min_left_s=settings.claim_min_left_s,
        claim_limit_s=settings.claim_limit_s,
        grant_wait_limit_s=settings.grant_wait_limit_s,
        keep_ended_s=settings.keep_ended_s,
        restored_wait_s=settings.claim_limit_s,
    )
