"""The block-lease registry: who may read which turn's KV blocks, until when.

``LeaseRegistry`` is the interface. ``LocalLeaseRegistry`` is the registry itself,
``GrpcLeaseRegistry`` speaks to one in another process.
"""

from kvtide.registry.events import EndCause, Ended, EngineReport, Grant
from kvtide.registry.links import EngineLink
from kvtide.registry.local import LocalLeaseRegistry
from kvtide.registry.ports import (
    ClaimedLease,
    ClaimResult,
    ConversationKey,
    EndReason,
    LeasePage,
    LeaseQuery,
    LeaseRegistry,
    LeaseState,
    LeaseView,
    MissReason,
    ReadOutcome,
    Settlement,
)
from kvtide.registry.remote import GrpcLeaseRegistry
from kvtide.registry.rules import LeaseRules
from kvtide.registry.servicer import SERVICE_NAME, add_registry_service, registry_service

__all__ = [
    "SERVICE_NAME",
    "ClaimResult",
    "ClaimedLease",
    "ConversationKey",
    "EndCause",
    "EndReason",
    "Ended",
    "EngineLink",
    "EngineReport",
    "Grant",
    "GrpcLeaseRegistry",
    "LeasePage",
    "LeaseQuery",
    "LeaseRegistry",
    "LeaseRules",
    "LeaseState",
    "LeaseView",
    "LocalLeaseRegistry",
    "MissReason",
    "ReadOutcome",
    "Settlement",
    "add_registry_service",
    "registry_service",
]
