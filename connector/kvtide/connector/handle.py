"""The KV handle and its two spellings: a typed value, and vLLM's ``kv_transfer_params``.

This is the only module that knows the key names of vLLM's dictionary (NIXL
connector version 14, vLLM 0.32 and 0.33). Pure: no I/O, no protobuf, no vLLM.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvtide.connector.fingerprint import block_count

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The key under which kvtide's own entries travel in ``kv_transfer_params``.
KVTIDE_KEY = "kvtide"

#: Keys that every readable handle has; P's connector ignores one without them.
REQUIRED_KEYS = (
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "remote_num_tokens",
)

#: Keys that say what the receiver shall do; never part of a handle.
_DIRECTION_KEYS = ("do_remote_prefill", "do_remote_decode")

_NAMED_KEYS = frozenset(
    (
        *REQUIRED_KEYS,
        *_DIRECTION_KEYS,
        "tp_size",
        "dcp_size",
        "pp_size",
        "remote_blocks_expiry_time",
        KVTIDE_KEY,
    )
)


@dataclass(frozen=True, slots=True)
class KvHandle:
    """Everything that prefill needs to read one turn's blocks from decode.

    ``block_groups`` has one tuple of block ids for each KV cache group.
    ``engine_clock_expiry_s`` is in seconds of the owning engine's perf_counter;
    None means unknown. ``extension_json`` keeps the keys that this class does
    not name, each value as JSON text.
    """

    engine_id: str
    request_id: str
    side_channel_host: str
    side_channel_port: int
    block_groups: tuple[tuple[int, ...], ...]
    token_count: int
    block_size_tokens: int
    engine_clock_expiry_s: float | None = None
    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    extension_json: Mapping[str, str] = field(default_factory=dict)

    @property
    def block_count(self) -> int:
        """Blocks over all groups."""
        return sum(len(group) for group in self.block_groups)


def handle_from_params(params: Mapping[str, Any], block_size_tokens: int) -> KvHandle:
    """Read a handle out of vLLM's dictionary.

    Raises ValueError naming the key that is missing or of the wrong type.
    """
    for key in REQUIRED_KEYS:
        if params.get(key) is None:
            msg = f"kv_transfer_params has no {key!r}"
            raise ValueError(msg)
    try:
        groups = tuple(tuple(int(i) for i in group) for group in params["remote_block_ids"])
        expiry = params.get("remote_blocks_expiry_time")
        return KvHandle(
            engine_id=str(params["remote_engine_id"]),
            request_id=str(params["remote_request_id"]),
            side_channel_host=str(params["remote_host"]),
            side_channel_port=int(params["remote_port"]),
            block_groups=groups,
            token_count=int(params["remote_num_tokens"]),
            block_size_tokens=block_size_tokens,
            engine_clock_expiry_s=None if expiry is None else float(expiry),
            tensor_parallel_size=int(params.get("tp_size") or 1),
            decode_context_parallel_size=int(params.get("dcp_size") or 1),
            pipeline_parallel_size=int(params.get("pp_size") or 1),
            extension_json={
                key: json.dumps(value) for key, value in params.items() if key not in _NAMED_KEYS
            },
        )
    except (TypeError, ValueError) as error:
        msg = f"kv_transfer_params is malformed: {error}"
        raise ValueError(msg) from error


def params_from_handle(handle: KvHandle) -> dict[str, Any]:
    """Spell a handle as the ``kv_transfer_params`` of a prefill request that reads it back."""
    params: dict[str, Any] = {
        key: json.loads(value) for key, value in handle.extension_json.items()
    }
    params.update(
        do_remote_decode=True,
        do_remote_prefill=False,
        remote_engine_id=handle.engine_id,
        remote_request_id=handle.request_id,
        remote_host=handle.side_channel_host,
        remote_port=handle.side_channel_port,
        remote_block_ids=[list(group) for group in handle.block_groups],
        remote_num_tokens=handle.token_count,
        tp_size=handle.tensor_parallel_size,
        dcp_size=handle.decode_context_parallel_size,
        pp_size=handle.pipeline_parallel_size,
    )
    if handle.engine_clock_expiry_s is not None:
        params["remote_blocks_expiry_time"] = handle.engine_clock_expiry_s
    return params


def cut_handle(handle: KvHandle, token_count: int) -> KvHandle:
    """Shorten a handle to its first ``token_count`` tokens, blocks and count alike.

    Both must change together: prefill takes the remote's blocks from the end,
    so a block too many shifts every read by one block.
    Raises ValueError if the handle is shorter than that, or has several block
    groups (their lists are clipped at the front and have no common prefix).
    """
    if token_count > handle.token_count:
        msg = f"cannot cut a handle of {handle.token_count} tokens to {token_count}"
        raise ValueError(msg)
    if token_count == handle.token_count:
        return handle
    keep = block_count(token_count, handle.block_size_tokens)
    if keep == block_count(handle.token_count, handle.block_size_tokens):
        return replace(handle, token_count=token_count)
    if len(handle.block_groups) != 1:
        msg = f"cannot cut a handle with {len(handle.block_groups)} block groups"
        raise ValueError(msg)
    return replace(handle, block_groups=(handle.block_groups[0][:keep],), token_count=token_count)
