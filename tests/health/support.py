"""Nodes for the tests of node health."""

from __future__ import annotations

from kvtide.health import NodeInfo, NodeLoad, NodeRole

LOAD = NodeLoad(
    free_blocks=90,
    pinned_blocks=10,
    running_requests=1,
    waiting_requests=2,
    last_step_age_s=0.5,
)


def make_info(
    node_id: str = "decode-1", epoch: str = "epoch-a", role: NodeRole = NodeRole.DECODE
) -> NodeInfo:
    return NodeInfo(
        node_id=node_id,
        epoch=epoch,
        role=role,
        engine_url="http://127.0.0.1:8100",
        models=("model-a", "model-b"),
        vllm_version="0.32.0",
        block_size_tokens=128,
        block_count=100,
        kv_recompute_threshold_tokens=64,
        decoder_kv_blocks_ttl_s=480.0,
        max_model_len_tokens=8192,
    )
