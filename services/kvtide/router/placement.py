"""Which engine serves which leg. Pure functions over a list of nodes and this router's counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.health.ports import Node, NodeRole, NodeState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

__all__ = ["choose_node", "fleet_is_ready", "model_is_known", "model_names", "ready_nodes"]


def ready_nodes(nodes: Iterable[Node], role: NodeRole, model: str) -> list[Node]:
    """The nodes that may take a leg of this role for this model now."""
    return [
        node
        for node in nodes
        if node.state is NodeState.READY and node.info.role is role and model in node.info.models
    ]


def choose_node(
    nodes: Iterable[Node],
    role: NodeRole,
    model: str,
    in_flight: Mapping[str, int],
    *,
    prefer: str = "",
    exclude: Collection[str] = (),
) -> Node | None:
    """The node for one leg; None when no node can take it.

    `prefer` wins when it is ready: a decode engine that served the last turn still has much of
    the prompt in its own cache. Else the least legs in flight from this router; `in_flight` is
    by node id. Ties go to the fewest requests, then the fewest pinned blocks, that the engine
    reported, then the node id, so that the choice is always the same for the same view.
    """
    candidates = [
        node for node in ready_nodes(nodes, role, model) if node.info.node_id not in exclude
    ]
    if not candidates:
        return None
    for node in candidates:
        if node.info.node_id == prefer:
            return node
    return min(
        candidates,
        key=lambda node: (
            in_flight.get(node.info.node_id, 0),
            node.load.running_requests + node.load.waiting_requests,
            node.load.pinned_blocks,
            node.info.node_id,
        ),
    )


def model_names(nodes: Iterable[Node]) -> list[str]:
    """Every model that some node serves or served, sorted."""
    return sorted({model for node in nodes for model in node.info.models})


def model_is_known(nodes: Collection[Node], model: str) -> bool:
    """Whether a request for this model makes sense.

    Nothing is known of an empty fleet, so it counts as known there: "not now" is the honest
    answer, "no such model" is not.
    """
    return not nodes or any(model in node.info.models for node in nodes)


def fleet_is_ready(nodes: Collection[Node]) -> bool:
    """Whether at least one model has both a ready prefill and a ready decode node."""
    return any(
        ready_nodes(nodes, NodeRole.PREFILL, model) and ready_nodes(nodes, NodeRole.DECODE, model)
        for model in model_names(nodes)
    )
