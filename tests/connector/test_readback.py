"""Prefill's decision what to read back, and how it reports what became of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtide.connector import readback as readback_module
from kvtide.connector.fingerprint import fingerprint_of
from kvtide.connector.readback import EngineCache, fingerprint_to_params, plan_readback
from kvtide.connector.turn_outcome import Readback, outcome_params

BLOCK = 128
HISTORY = [i % 251 for i in range(300)]
CACHE = EngineCache(block_size_tokens=BLOCK)


def request_params(history: list[int] = HISTORY, **changes: Any) -> dict[str, Any]:
    """A prefill request that wants to read ``history`` back."""
    blocks = -(-len(history) // BLOCK)
    params: dict[str, Any] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_block_ids": [list(range(10, 10 + blocks))],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "h",
        "remote_port": 1,
        "remote_num_tokens": len(history),
        "remote_blocks_expiry_time": 99.0,
        "kvtide": {"fingerprint": fingerprint_to_params(fingerprint_of(history, BLOCK))},
    }
    params.update(changes)
    return params


def test_matching_history_is_read_whole() -> None:
    """A prompt that continues the history reads all of it, the partial last block too."""
    plan = plan_readback(request_params(), [*HISTORY, 1, 2], CACHE)
    assert plan.handle is not None
    assert (plan.handle.token_count, plan.handle.block_groups) == (300, ((10, 11, 12),))
    assert plan.reason == "pulled"


def edited(position: int) -> list[int]:
    """The history with one token changed, and something after it."""
    prompt = [*HISTORY, 5, 6]
    prompt[position] += 1
    return prompt


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        pytest.param(edited(299), 256, id="last token edited"),
        pytest.param(edited(256), 256, id="first token of the third block edited"),
        pytest.param(edited(255), 128, id="last token of the second block edited"),
        pytest.param(HISTORY[:299], 256, id="shorter prompt"),
        pytest.param(HISTORY[:256], 256, id="shorter prompt on a boundary"),
        pytest.param(HISTORY[:200] + [7] * 200, 128, id="fork"),
        pytest.param([*HISTORY[:150], 9, *HISTORY[150:]], 128, id="token inserted"),
    ],
)
def test_changed_history_is_cut_to_whole_verified_blocks(prompt: list[int], tokens: int) -> None:
    """Blocks and count are cut together to what the prompt provably shares."""
    plan = plan_readback(request_params(), prompt, CACHE)
    assert plan.handle is not None
    assert plan.handle.token_count == tokens
    assert len(plan.handle.block_groups[0]) == tokens // BLOCK


@pytest.mark.parametrize(
    ("params", "cache", "reason"),
    [
        ({"do_remote_decode": True}, CACHE, "no_handle"),
        (request_params(kvtide={}), CACHE, "unverified"),
        (request_params(kvtide={"fingerprint": {"digests": "!"}}), CACHE, "unverified"),
        (request_params(kvtide="x"), CACHE, "unverified"),
        (request_params(remote_num_tokens=299), CACHE, "unverified"),
        (request_params(remote_block_ids=[[1, 2]]), CACHE, "unverified"),
        (request_params(remote_block_ids=[[1, 2, 3, 4]]), CACHE, "unverified"),
        (request_params(remote_blocks_expiry_time=None), CACHE, "unverified"),
        (request_params(remote_port="x"), CACHE, "unverified"),
        (request_params(), EngineCache(16), "block_size_mismatch"),
        (request_params(), EngineCache(BLOCK, readback_possible=False), "unsupported_cache"),
        (request_params([1, *HISTORY]), CACHE, "history_changed"),
    ],
)
def test_unprovable_handle_is_not_read(
    params: dict[str, Any], cache: EngineCache, reason: str
) -> None:
    """Whatever is wrong with a handle, nothing is read and the reason says why."""
    plan = plan_readback(params, HISTORY, cache)
    assert (plan.handle, plan.reason) == (None, reason)


def test_front_clipped_cache_reads_whole_or_not_at_all() -> None:
    """A sliding-window cache has no block list that could be cut: a change means no read."""
    cache = EngineCache(BLOCK, prefix_cut_possible=False)
    assert plan_readback(request_params(), edited(299), cache).reason == "history_changed"
    assert plan_readback(request_params(), [*HISTORY, 1], cache).handle is not None


def outcome(readback: Readback) -> dict[str, Any]:
    """The outcome of a 1,000-token prompt."""
    return outcome_params(readback, prompt_tokens=1000, prompt_digest="d", threshold_tokens=64)


def test_counts_add_up_to_the_prompt() -> None:
    """Pulled, cached and recomputed tokens are the whole prompt, no token twice."""
    readback = Readback("pulled", handle_tokens=900, verified_tokens=900, cached_tokens=128)
    readback.started(772)
    found = outcome(readback)
    assert (found["pulled_tokens"], found["cached_tokens"], found["recomputed_tokens"]) == (
        772,
        128,
        100,
    )
    assert (found["reuse"], found["read"]) == ("pulled", "read")


def test_last_prompt_token_counts_as_recomputed() -> None:
    """Even when every token was pulled, prefill computes the last one for its output."""
    readback = Readback("pulled", handle_tokens=1000, verified_tokens=1000)
    readback.started(1000)
    assert (outcome(readback)["pulled_tokens"], outcome(readback)["recomputed_tokens"]) == (999, 1)


def test_failed_read_counts_nothing_as_pulled() -> None:
    """A read that failed is reported as recomputed, and the lease's fate as unknown."""
    readback = Readback("pulled", handle_tokens=900, verified_tokens=900)
    readback.started(900)
    readback.failed = True
    readback.started_over()
    found = outcome(readback)
    assert (found["pulled_tokens"], found["recomputed_tokens"]) == (0, 1000)
    assert (found["reuse"], found["read"]) == ("transfer_failed", "unknown")


def test_preempted_request_does_not_claim_what_it_lost() -> None:
    """A request that was preempted after its read computed the tokens again, and says so."""
    readback = Readback("pulled", handle_tokens=900, verified_tokens=900)
    readback.started(900)
    readback.started_over()
    assert outcome(readback)["reuse"] == "preempted"
    assert outcome(readback)["pulled_tokens"] == 0


@pytest.mark.parametrize(
    ("verified", "cached", "reuse"), [(160, 128, "below_threshold"), (128, 256, "cached")]
)
def test_small_or_needless_reads_say_why_and_count_as_read(
    verified: int, cached: int, reuse: str
) -> None:
    """Nothing was pulled, yet decode was told to free the blocks: the lease is spent."""
    readback = Readback("pulled", 160, verified, cached)
    readback.started(0)
    assert (outcome(readback)["reuse"], outcome(readback)["read"]) == (reuse, "read")


def test_refused_handle_leaves_the_lease_unread() -> None:
    """A handle that verification refused was not touched: its lease can be used again."""
    found = outcome(Readback("history_changed", handle_tokens=900))
    assert (found["reuse"], found["read"]) == ("history_changed", "not_read")


def test_every_reason_is_documented() -> None:
    """Whatever ``reuse`` may say, docs/turn-report.md explains it."""
    text = (Path(__file__).parents[2] / "docs" / "turn-report.md").read_text()
    reasons = [value for name, value in vars(readback_module).items() if name.startswith("REUSE_")]
    missing = {f"`{reason}`" for reason in reasons if f"`{reason}`" not in text}
    assert missing <= {"`no_handle`"}, "only no_handle may be missing: the router replaces it"
