"""What a fake engine is: the flags of the real one, as far as kvtide can tell them apart."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

Role = Literal["prefill", "decode", "monolith"]

#: "none" is plain vLLM, "stock" upstream's NIXL pull connector, "leased" kvtide's.
ConnectorKind = Literal["none", "stock", "leased"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one fake engine; what has a vLLM flag has vLLM's default."""

    node_id: str
    role: Role
    connector: ConnectorKind = "leased"
    model: str = "tiny"
    host: str = "127.0.0.1"
    http_port: int = 0
    """0: any free port, which a restart then keeps."""
    side_channel_port: int = 0
    block_size_tokens: int = 128
    block_count: int = 129
    """Blocks in the pool; as in vLLM, block 0 is never handed out."""
    max_model_len_tokens: int = 2048
    max_running_requests: int = 64
    prefix_caching: bool = True
    prompt_tokens_details: bool = True
    """``usage.prompt_tokens_details`` (vLLM: ``--enable-prompt-tokens-details``)."""
    params_in_stream: bool = False
    """Put ``kv_transfer_params`` on a stream's finish chunk, as vLLM 0.33 does."""
    vllm_version: str = "0.32.0"
    load_failure_policy: Literal["fail", "recompute"] = "fail"
    bidirectional: bool = True
    kv_recompute_threshold_tokens: int = 64
    decoder_kv_blocks_ttl_s: float = 480.0
    kv_lease_duration_s: float = 30.0
    """How long prefill keeps a prompt's blocks for decode, unless decode heartbeats."""
    handshake_timeout_s: float = 5.0
    clock_offset_s: float = 0.0
    """Added to the clock source: perf_counter has another zero on every host."""
    registry_address: str = ""
    """host:port of the block-lease registry; empty: none (leased connector only)."""
    health_address: str = ""
    """host:port of node health; empty: none (leased connector only)."""
    eos_interval: int = 0
    """The model ends its answer by itself about once in this many tokens; 0: never."""

    @property
    def compatibility_hash(self) -> str:
        """Two engines whose hashes differ refuse each other's handshake."""
        factors = f"{self.vllm_version}|{self.model}|uint64|pull"
        return hashlib.sha256(factors.encode()).hexdigest()


class EngineClock:
    """An engine's own monotonic clock: a source that tests can move, plus an offset."""

    def __init__(self, source: Callable[[], float] = perf_counter, offset_s: float = 0.0) -> None:
        self._source = source
        self._offset_s = offset_s

    def now_s(self) -> float:
        """Seconds since this engine's own zero."""
        return self._source() + self._offset_s
