"""The connector in real vLLM: what upstream gets wrong, and how pins end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtide.local.metrics import UNSAFE_READS
from tests.fakes.waiting import eventually
from tests.suite.conversation import LOGPROB_TOLERANCE, salted_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine.conftest import Engines

_EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"


def same(got: Any, right: Any) -> None:
    """The same text, and log probabilities equal up to rounding."""
    assert got.status == 200, got.body
    assert got.text == right.text
    pairs = zip(got.logprobs, right.logprobs, strict=True)
    assert max(abs(one - other) for one, other in pairs) < LOGPROB_TOLERANCE


@pytest.mark.parametrize(
    ("changes", "reuse"),
    [
        pytest.param({"engine_clock_expiry_s": 1.0}, "transfer_failed", id="declined-as-expired"),
        pytest.param({"engine_id": "restarted"}, "transfer_failed", id="refused-by-handshake"),
        pytest.param(
            {"engine_id": "elsewhere", "side_channel_port": 9},
            "transfer_failed",
            id="nobody-listens",
        ),
        pytest.param({"engine_clock_expiry_s": None}, "unverified", id="no-expiry"),
    ],
)
async def test_failed_or_declined_readback_recomputes_and_answers(
    engines: Engines, reference: Callable[..., Any], changes: dict[str, Any], reuse: str
) -> None:
    """Where upstream promises a second load and waits for ever, the turn is computed and right."""
    name = f"declined-{reuse}-{next(iter(changes.values()))}"
    history, claimed = await engines.claimed_turn(name, salted_text(300, name))
    prompt = history + "and then"
    turn = await engines.turn(prompt, claimed.params(**changes))
    outcome = turn.prefill.outcome
    assert (outcome["reuse"], outcome["pulled_tokens"]) == (reuse, 0)
    assert outcome["recomputed_tokens"] == len(prompt)
    same(turn.decode, await reference(prompt))
    await engines.close_conversation(name)


async def test_release_frees_at_once_and_is_no_expiry(engines: Engines) -> None:
    """A closed conversation's blocks go back to the pool, and vLLM counts no expired lease."""
    name = "released"
    before = await engines.pinned_blocks()
    expired = await engines.counter("decode", _EXPIRED)
    await engines.claim(name)
    await engines.turn(salted_text(400, name))

    async def pinned(blocks: int) -> bool:
        return await engines.pinned_blocks() == before + blocks

    await eventually(lambda: pinned(4))
    await engines.close_conversation(name)
    await eventually(lambda: pinned(0))
    assert await engines.counter("decode", _EXPIRED) == expired
    # The engine lives: a request that finished twice would have killed it.
    await engines.turn(salted_text(50, "after release"))


async def test_read_by_a_prefill_engine_frees_the_pin(engines: Engines) -> None:
    """One completed read ends the lease on decode, without release or expiry."""
    name = "consumed"
    before = await engines.pinned_blocks()
    history, claimed = await engines.claimed_turn(name, salted_text(300, name))

    async def pinned(blocks: int) -> bool:
        return await engines.pinned_blocks() == before + blocks

    await eventually(lambda: pinned(3))
    await engines.prefill_leg(history + "more", claimed.params())
    await eventually(lambda: pinned(0))
    await engines.close_conversation(name)
    assert await engines.counter("decode", UNSAFE_READS) == 0


async def test_decode_recomputes_when_prefill_computed_another_prompt(
    engines: Engines, reference: Callable[..., Any]
) -> None:
    """Legs that disagree on the prompt cost a recompute: decode never reads another's KV."""
    name = "disagreeing legs"
    other, prompt = salted_text(300, name + "1"), salted_text(300, name + "2")
    prefill = await engines.prefill_leg(other)
    engines.turn_ids = {"prompt_digest": prefill.outcome["prompt_digest"]}
    answer = await engines.decode_leg(prompt, prefill.params)
    same(answer, await reference(prompt))


async def test_request_without_a_conversation_pins_nothing(engines: Engines) -> None:
    """Upstream pins every answer for its whole TTL; kvtide only those that someone may claim."""
    before = await engines.pinned_blocks()
    free = (await engines.fleet.pool("decode")).free_blocks
    engines.turn_ids = {}
    await engines.turn(salted_text(500, "nobody"))

    async def all_free() -> bool:
        return (await engines.fleet.pool("decode")).free_blocks == free

    await eventually(all_free)
    assert await engines.pinned_blocks() == before
