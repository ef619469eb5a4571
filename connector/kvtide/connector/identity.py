"""Describes a vLLM engine to the fleet: reads vLLM's configuration, decides nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtide.connector.agent import EngineIdentity

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvtide.connector.engine_settings import EngineSettings
    from kvtide.connector.scheduler import LeasedNixlScheduler


def describe_engine(
    vllm_config: VllmConfig, settings: EngineSettings, scheduler: LeasedNixlScheduler
) -> EngineIdentity:
    """Build the identity that this engine reports; one for each data-parallel rank."""
    from vllm import __version__ as vllm_version

    names = vllm_config.model_config.served_model_name
    identity = EngineIdentity(
        node_id=settings.node_id,
        epoch=scheduler.engine_id,
        is_prefill=vllm_config.kv_transfer_config.kv_role == "kv_producer",
        url=settings.url,
        models=(names,) if isinstance(names, str) else tuple(names),
        vllm_version=vllm_version,
        block_size_tokens=scheduler.block_size,
        block_count=scheduler.pool_blocks,
        kv_recompute_threshold_tokens=scheduler.kv_recompute_threshold,
        ttl_s=scheduler.ttl_s,
        max_model_len_tokens=vllm_config.model_config.max_model_len,
    )
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        return replace(identity, node_id=f"{identity.node_id}/dp{parallel.data_parallel_index}")
    return identity
