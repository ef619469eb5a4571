"""Node health: which engines are alive, and what they are.

``NodeHealth`` is the interface. ``LocalNodeHealth`` is the detector itself,
``GrpcNodeHealth`` speaks to one in another process.
"""

from kvtide.health.detector import HealthRules
from kvtide.health.links import NodeLink
from kvtide.health.local import LocalNodeHealth
from kvtide.health.ports import Node, NodeHealth, NodeInfo, NodeLoad, NodeRole, NodeState
from kvtide.health.remote import GrpcNodeHealth
from kvtide.health.servicer import SERVICE_NAME, add_health_service, health_service

__all__ = [
    "SERVICE_NAME",
    "GrpcNodeHealth",
    "HealthRules",
    "LocalNodeHealth",
    "Node",
    "NodeHealth",
    "NodeInfo",
    "NodeLink",
    "NodeLoad",
    "NodeRole",
    "NodeState",
    "add_health_service",
    "health_service",
]
