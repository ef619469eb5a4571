"""Node health messages as protobuf, and back. No decisions. Durations are whole milliseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.health.ports import Node, NodeInfo, NodeLoad, NodeRole, NodeState
from kvtide.runtime.errors import InvalidArgument
from kvtide.v1 import node_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_UINT32 = 2**32 - 1

_ROLES: dict[NodeRole, pb.NodeRole] = {
    NodeRole.PREFILL: pb.NODE_ROLE_PREFILL,
    NodeRole.DECODE: pb.NODE_ROLE_DECODE,
}
_STATES: dict[NodeState, pb.NodeState] = {
    NodeState.STARTING: pb.NODE_STATE_STARTING,
    NodeState.READY: pb.NODE_STATE_READY,
    NodeState.SUSPECT: pb.NODE_STATE_SUSPECT,
    NodeState.DOWN: pb.NODE_STATE_DOWN,
}
_ROLES_BACK = {number: role for role, number in _ROLES.items()}
_STATES_BACK = {number: state for state, number in _STATES.items()}


def milliseconds(duration_s: float) -> int:
    """A duration in milliseconds, rounded to the nearest and cut to what the wire holds."""
    return min(_MAX_UINT32, max(0, round(duration_s * 1000)))


def info_to_proto(info: NodeInfo) -> pb.NodeInfo:
    """Convert to the wire form."""
    return pb.NodeInfo(
        node_id=info.node_id,
        epoch=info.epoch,
        role=_ROLES[info.role],
        engine_url=info.engine_url,
        models=info.models,
        vllm_version=info.vllm_version,
        block_size_tokens=info.block_size_tokens,
        block_count=info.block_count,
        kv_recompute_threshold_tokens=info.kv_recompute_threshold_tokens,
        decoder_kv_blocks_ttl_ms=milliseconds(info.decoder_kv_blocks_ttl_s),
        max_model_len_tokens=info.max_model_len_tokens,
    )


def info_from_proto(message: pb.NodeInfo) -> NodeInfo:
    """Convert from the wire form. Raises ``InvalidArgument``."""
    role = _ROLES_BACK.get(message.role)
    if role is None:
        raise InvalidArgument("invalid_role", f"there is no node role {message.role}")
    return NodeInfo(
        node_id=message.node_id,
        epoch=message.epoch,
        role=role,
        engine_url=message.engine_url,
        models=tuple(message.models),
        vllm_version=message.vllm_version,
        block_size_tokens=message.block_size_tokens,
        block_count=message.block_count,
        kv_recompute_threshold_tokens=message.kv_recompute_threshold_tokens,
        decoder_kv_blocks_ttl_s=message.decoder_kv_blocks_ttl_ms / 1000,
        max_model_len_tokens=message.max_model_len_tokens,
    )


def load_to_proto(load: NodeLoad) -> pb.NodeLoad:
    """Convert to the wire form."""
    return pb.NodeLoad(
        free_blocks=load.free_blocks,
        pinned_blocks=load.pinned_blocks,
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        last_step_age_ms=milliseconds(load.last_step_age_s),
    )


def load_from_proto(message: pb.NodeLoad) -> NodeLoad:
    """Convert from the wire form."""
    return NodeLoad(
        free_blocks=message.free_blocks,
        pinned_blocks=message.pinned_blocks,
        running_requests=message.running_requests,
        waiting_requests=message.waiting_requests,
        last_step_age_s=message.last_step_age_ms / 1000,
    )


def node_to_proto(node: Node) -> pb.Node:
    """Convert to the wire form."""
    return pb.Node(
        info=info_to_proto(node.info),
        state=_STATES[node.state],
        load=load_to_proto(node.load),
        silent_ms=milliseconds(node.silent_s),
    )


def node_from_proto(message: pb.Node) -> Node:
    """Convert from the wire form. A state of a newer version counts as suspect: no new turns.

    Raises ``InvalidArgument`` when the rest of it makes no sense.
    """
    return Node(
        info=info_from_proto(message.info),
        state=_STATES_BACK.get(message.state, NodeState.SUSPECT),
        load=load_from_proto(message.load),
        silent_s=message.silent_ms / 1000,
    )


def nodes_to_proto(nodes: Iterable[Node]) -> list[pb.Node]:
    """Convert to the wire form."""
    return [node_to_proto(node) for node in nodes]


def nodes_from_proto(messages: Iterable[pb.Node]) -> list[Node]:
    """Convert from the wire form; nodes whose role this version does not know are left out."""
    return [node_from_proto(message) for message in messages if message.info.role in _ROLES_BACK]
