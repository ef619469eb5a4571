"""One conversation on record: the turns that were opened, and its newest lease."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtide.registry.due import NEVER_S

if TYPE_CHECKING:
    from kvtide.registry.lease import Lease
    from kvtide.registry.ports import ConversationKey


@dataclass(slots=True, eq=False)
class Conversation:
    """What is remembered of one conversation besides its older leases."""

    key: ConversationKey
    last_generation: int = 0
    """The newest turn that is known to have been opened, by whomever."""
    opened_generation: int = 0
    """The newest turn that this table opened; 0: none."""
    granted_generation: int = 0
    """The newest turn that left a lease; stays when the lease has gone."""
    closed_generation: int = 0
    """Grants up to this turn are released on arrival."""
    lease: Lease | None = None
    """The newest one accepted, ended or not, as long as it is on record."""
    awaited_generation: int = 0
    """The turn whose grant is known to be on its way; 0: none."""
    awaited_until_s: float = 0.0
    last_used_s: float = 0.0
    filed_due_s: float = NEVER_S
