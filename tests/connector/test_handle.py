"""The handle's spellings, and how it is cut."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.connector.fingerprint import fingerprint_of
from kvtide.connector.handle import KvHandle, cut_handle, handle_from_params, params_from_handle
from kvtide.connector.wire import (
    fingerprint_from_proto,
    fingerprint_to_proto,
    handle_from_proto,
    handle_to_proto,
    ids_from_runs,
    runs_from_ids,
)
from kvtide.v1 import kv_pb2

PARAMS: dict[str, Any] = {
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[7, 8, 3]],
    "remote_engine_id": "engine-1",
    "remote_request_id": "req-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 300,
    "remote_blocks_expiry_time": 1234.5,
    "tp_size": 2,
    "dcp_size": 1,
    "pp_size": 1,
    "transfer_mode": "pull",
    "a_key_of_tomorrow": {"x": [1]},
}


def test_params_survive_the_round_trip_through_protobuf() -> None:
    """Every key that vLLM wrote reaches prefill unchanged, the unknown ones too."""
    handle = handle_from_params(PARAMS, 128)
    wire = kv_pb2.KvHandle.FromString(handle_to_proto(handle).SerializeToString())
    assert params_from_handle(handle_from_proto(wire)) == PARAMS


def test_kvtides_own_key_is_not_part_of_a_handle() -> None:
    """What the router adds for itself does not come back as if vLLM had written it."""
    handle = handle_from_params({**PARAMS, "kvtide": {"tenant": "x"}}, 128)
    assert "kvtide" not in params_from_handle(handle)


@pytest.mark.parametrize("key", ["remote_engine_id", "remote_block_ids", "remote_num_tokens"])
def test_missing_key_is_named(key: str) -> None:
    """A handle that lacks a key is refused with the key's name."""
    with pytest.raises(ValueError, match=key):
        handle_from_params({k: v for k, v in PARAMS.items() if k != key}, 128)


def test_malformed_block_ids_are_refused() -> None:
    """Block ids of the wrong type are an error here, not somewhere inside the engine."""
    with pytest.raises(ValueError, match="malformed"):
        handle_from_params({**PARAMS, "remote_block_ids": [["seven"]]}, 128)


def handle(tokens: int, groups: tuple[tuple[int, ...], ...]) -> KvHandle:
    """A handle with blocks of 128 tokens."""
    return KvHandle("e", "r", "h", 1, groups, tokens, 128)


def test_cut_shortens_blocks_and_count_together() -> None:
    """A handle cut to two blocks names two blocks and their tokens: prefill reads by suffix."""
    cut = cut_handle(handle(300, ((7, 8, 3),)), 256)
    assert (cut.block_groups, cut.token_count) == (((7, 8),), 256)


def test_cut_within_the_last_block_keeps_several_groups() -> None:
    """Dropping tokens of the last block needs no block list to change."""
    cut = cut_handle(handle(300, ((1, 2, 3), (9,))), 299)
    assert (cut.block_groups, cut.token_count) == (((1, 2, 3), (9,)), 299)


@pytest.mark.parametrize(("groups", "tokens"), [(((1, 2, 3),), 301), (((1, 2, 3), (9,)), 128)])
def test_impossible_cut_is_refused(groups: tuple[tuple[int, ...], ...], tokens: int) -> None:
    """A handle can't grow, and one with front-clipped groups has no common prefix."""
    with pytest.raises(ValueError, match="cannot cut"):
        cut_handle(handle(300, groups), tokens)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_block_ids_survive_run_length_coding(ids: list[int]) -> None:
    """Any list of block ids, in any order, comes back as it was."""
    assert ids_from_runs(runs_from_ids(ids)) == tuple(ids)


def test_contiguous_blocks_cost_a_few_bytes() -> None:
    """Blocks that lie side by side are one run, however many they are."""
    assert runs_from_ids(range(100, 1600)).ByteSize() < 12


def test_uneven_runs_are_refused() -> None:
    """Run-length lists of different lengths are an error that says so."""
    with pytest.raises(ValueError, match="1 first_id_deltas but 2 run_lengths"):
        ids_from_runs(kv_pb2.BlockRuns(first_id_deltas=[1], run_lengths=[1, 2]))


@pytest.mark.parametrize("field", ["engine_id", "request_id", "side_channel_port"])
def test_handle_message_without_a_needed_field_is_refused(field: str) -> None:
    """A handle message with an empty field is refused with the field's name."""
    message = handle_to_proto(handle_from_params(PARAMS, 128))
    message.ClearField(field)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=field):
        handle_from_proto(message)


def test_fingerprint_survives_protobuf() -> None:
    """A fingerprint reaches prefill as decode made it."""
    fingerprint = fingerprint_of(range(300), 128)
    assert fingerprint_from_proto(fingerprint_to_proto(fingerprint)) == fingerprint
