"""Handle and fingerprint as protobuf messages, and back. No decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtide.connector.fingerprint import Fingerprint
from kvtide.connector.handle import KvHandle
from kvtide.v1 import kv_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable


def runs_from_ids(block_ids: Iterable[int]) -> kv_pb2.BlockRuns:
    """Run-length code block ids; any order, each id non-negative."""
    firsts: list[int] = []
    lengths: list[int] = []
    expected = None
    for block_id in block_ids:
        if block_id == expected:
            lengths[-1] += 1
        else:
            firsts.append(block_id)
            lengths.append(1)
        expected = block_id + 1
    deltas = [first - previous for previous, first in zip([0, *firsts], firsts, strict=False)]
    return kv_pb2.BlockRuns(first_id_deltas=deltas, run_lengths=lengths)


def ids_from_runs(runs: kv_pb2.BlockRuns) -> tuple[int, ...]:
    """Undo ``runs_from_ids``. Raises ValueError when the two lists differ in length."""
    if len(runs.first_id_deltas) != len(runs.run_lengths):
        msg = (
            f"BlockRuns has {len(runs.first_id_deltas)} first_id_deltas "
            f"but {len(runs.run_lengths)} run_lengths"
        )
        raise ValueError(msg)
    ids: list[int] = []
    first = 0
    for delta, length in zip(runs.first_id_deltas, runs.run_lengths, strict=True):
        first += delta
        ids.extend(range(first, first + length))
    return tuple(ids)


def handle_to_proto(handle: KvHandle) -> kv_pb2.KvHandle:
    """Convert to the wire form."""
    return kv_pb2.KvHandle(
        engine_id=handle.engine_id,
        request_id=handle.request_id,
        side_channel_host=handle.side_channel_host,
        side_channel_port=handle.side_channel_port,
        tensor_parallel_size=handle.tensor_parallel_size,
        decode_context_parallel_size=handle.decode_context_parallel_size,
        pipeline_parallel_size=handle.pipeline_parallel_size,
        block_groups=[runs_from_ids(group) for group in handle.block_groups],
        token_count=handle.token_count,
        block_size_tokens=handle.block_size_tokens,
        engine_clock_expiry_s=handle.engine_clock_expiry_s,
        extension_json=dict(handle.extension_json),
    )


def handle_from_proto(message: kv_pb2.KvHandle) -> KvHandle:
    """Convert from the wire form. Raises ValueError when a field is missing or invalid."""
    for name in ("engine_id", "request_id", "side_channel_host", "side_channel_port"):
        if not getattr(message, name):
            msg = f"KvHandle.{name} is empty"
            raise ValueError(msg)
    if not message.block_size_tokens:
        msg = "KvHandle.block_size_tokens is 0"
        raise ValueError(msg)
    return KvHandle(
        engine_id=message.engine_id,
        request_id=message.request_id,
        side_channel_host=message.side_channel_host,
        side_channel_port=message.side_channel_port,
        block_groups=tuple(ids_from_runs(runs) for runs in message.block_groups),
        token_count=message.token_count,
        block_size_tokens=message.block_size_tokens,
        engine_clock_expiry_s=(
            message.engine_clock_expiry_s if message.HasField("engine_clock_expiry_s") else None
        ),
        tensor_parallel_size=message.tensor_parallel_size or 1,
        decode_context_parallel_size=message.decode_context_parallel_size or 1,
        pipeline_parallel_size=message.pipeline_parallel_size or 1,
        extension_json=dict(message.extension_json),
    )


def fingerprint_to_proto(fingerprint: Fingerprint) -> kv_pb2.PrefixFingerprint:
    """Convert to the wire form."""
    return kv_pb2.PrefixFingerprint(
        algorithm=fingerprint.algorithm,
        block_size_tokens=fingerprint.block_size_tokens,
        token_count=fingerprint.token_count,
        digests=fingerprint.digests,
    )


def fingerprint_from_proto(message: kv_pb2.PrefixFingerprint) -> Fingerprint:
    """Convert from the wire form. Raises ValueError when the lengths do not fit together."""
    return Fingerprint(
        message.algorithm, message.block_size_tokens, message.token_count, message.digests
    )
