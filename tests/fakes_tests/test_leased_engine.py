"""kvtide's connector on the fake engines, without any service: verified reads, leased pins."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvtide.connector.handle import params_from_handle
from kvtide.connector.pins import PIN_GRACE_S
from kvtide.connector.readback import fingerprint_to_params
from tests.fakes.waiting import eventually
from tests.fakes_tests.conftest import Pair

if TYPE_CHECKING:
    import aiohttp

    from kvtide.runtime.clock import ManualClock
    from tests.fakes.engine import FakeEngine
    from tests.fakes_tests.conftest import StartEngine

_TTL_S = 480.0
_FIRST = "The first turn of a conversation of some length. " * 6


@pytest.fixture
async def leased(
    start_engine: StartEngine, monolith: FakeEngine, http: aiohttp.ClientSession
) -> Pair:
    """Our connector on both, prefill without a prefix cache, clocks hours apart."""
    prefill = await start_engine(
        "prefill",
        "leased",
        prefix_caching=False,
        clock_offset_s=7_200.0,
        load_failure_policy="recompute",
    )
    decode = await start_engine("decode", "leased", load_failure_policy="recompute")
    pair = Pair(prefill, decode, monolith, http)
    pair.hand.turn_ids = {"tenant": "t", "conversation_id": "c", "generation": 1}
    return pair


def _handle(pair: Pair) -> dict[str, Any]:
    """What the registry would hand out for decode's only pin."""
    _events, (pin,) = pair.decode.leased.pins.snapshot()
    fingerprint = fingerprint_to_params(pin.fingerprint())
    return {**params_from_handle(pin.handle), "kvtide": {"fingerprint": fingerprint}}


async def _first_turn(pair: Pair) -> tuple[str, dict[str, Any]]:
    turn = await pair.hand.turn(_FIRST)
    assert turn.decode.text == await pair.truth(_FIRST)
    assert turn.decode.body["kv_transfer_params"] is None
    return _FIRST + turn.decode.text, _handle(pair)


def _all_free(engine: FakeEngine) -> bool:
    pool = engine.pool_state()
    return pool.free_blocks == pool.total_blocks and not engine.core.requests


async def test_an_extended_history_is_pulled_whole(leased: Pair) -> None:
    """All of the handle is verified and read, its partial last block too."""
    history, handle = await _first_turn(leased)
    turn = await leased.hand.turn(history + "And then?", handle)
    assert turn.decode.text == await leased.truth(history + "And then?")
    outcome = turn.prefill.outcome
    assert (outcome["reuse"], outcome["read"]) == ("pulled", "read")
    assert outcome["pulled_tokens"] == handle["remote_num_tokens"] == len(history) - 1
    assert outcome["pulled_tokens"] + outcome["recomputed_tokens"] == len(history) + 9
    assert leased.decode.unsafe_reads == 0


@pytest.mark.parametrize(
    ("edit", "pulled"),
    [
        pytest.param(lambda h: h[:100] + "x" * 30 + h[130:] + "more", 96, id="middle-edited"),
        pytest.param(lambda h: "x" + h[1:] + "more", 0, id="first-token-edited"),
        pytest.param(lambda h: h[:150], 144, id="shorter-prompt"),
        pytest.param(lambda h: h[:144], 143, id="shorter-prompt-whole-blocks"),
        pytest.param(lambda h: h[:210] + "another way this went" * 8, 208, id="fork"),
    ],
)
async def test_another_history_is_read_as_far_as_it_is_the_same(
    leased: Pair, edit: Any, pulled: int
) -> None:
    """The handle that makes upstream answer wrongly is cut to the common whole blocks."""
    history, handle = await _first_turn(leased)
    prompt = edit(history)
    turn = await leased.hand.turn(prompt, handle, cache_salt="own")
    assert turn.decode.text == await leased.truth(prompt)
    assert turn.prefill.outcome["pulled_tokens"] == pulled
    if not pulled:
        # Nothing was read, so the blocks are still there for whoever has that history.
        assert turn.prefill.outcome["reuse"] == "history_changed"
        assert turn.prefill.outcome["read"] == "not_read"


async def test_a_declined_read_recomputes_and_answers(leased: Pair, clock: ManualClock) -> None:
    """Where upstream hangs, the turn is served by plain prefill, and says so."""
    history, handle = await _first_turn(leased)
    clock.advance(_TTL_S + PIN_GRACE_S - 4)
    turn = await leased.hand.turn(history + "more", handle)
    assert turn.decode.text == await leased.truth(history + "more")
    assert turn.prefill.outcome["pulled_tokens"] == 0
    assert turn.prefill.outcome["reuse"] == "transfer_failed"
    assert leased.decode.unsafe_reads == 0


@pytest.mark.parametrize("fault", ["refuse_handshakes", "refuse_reads"])
async def test_a_failed_read_recomputes_and_answers(leased: Pair, fault: str) -> None:
    """A transfer that fails costs a recompute; the blocks stay until their deadline."""
    history, handle = await _first_turn(leased)
    setattr(leased.decode.faults, fault, True)
    turn = await leased.hand.turn(history + "more", handle)
    assert turn.decode.text == await leased.truth(history + "more")
    outcome = turn.prefill.outcome
    assert (outcome["reuse"], outcome["read"]) == ("transfer_failed", "unknown")
    assert leased.decode.pool_state().pinned_requests == 2


async def test_a_preemption_after_the_load_recomputes_and_answers(leased: Pair) -> None:
    """What was loaded is gone with the request's blocks; upstream would wait for ever."""
    history, handle = await _first_turn(leased)
    leased.prefill.faults.preempt_after_load = 1
    turn = await leased.hand.turn(history + "more", handle)
    assert turn.decode.text == await leased.truth(history + "more")
    assert turn.prefill.outcome["pulled_tokens"] == 0
    assert turn.prefill.outcome["reuse"] == "preempted"


async def test_a_handle_without_fingerprint_or_expiry_is_not_read(leased: Pair) -> None:
    """What cannot be verified, or whose deadline is unknown, is recomputed."""
    history, handle = await _first_turn(leased)
    bare = {key: value for key, value in handle.items() if key != "kvtide"}
    timeless = {k: v for k, v in handle.items() if k != "remote_blocks_expiry_time"}
    for incomplete in (bare, timeless):
        answer = await leased.hand.prefill_leg(history + "more", incomplete)
        assert answer.outcome["reuse"] == "unverified"
        assert answer.outcome["read"] == "not_read"
    assert leased.decode.pool_state().pinned_requests == 1


async def test_decode_pins_only_turns_of_a_conversation(leased: Pair) -> None:
    """Without tenant, conversation and generation nothing stays, with or without prefill."""
    leased.hand.turn_ids = {}
    await leased.hand.turn(_FIRST)
    await leased.hand.complete(leased.decode.url, _FIRST)
    assert _all_free(leased.decode)
    ids = {"tenant": "t", "conversation_id": "c", "generation": 1}
    await leased.hand.decode_leg(_FIRST, {"kvtide": ids})
    assert _all_free(leased.decode)
    # Served plainly, without a prefill leg, a turn is pinned all the same.
    leased.hand.turn_ids = ids
    await leased.hand.decode_leg(_FIRST, {})
    assert leased.decode.pool_state().pinned_requests == 1


async def test_pins_end_a_grace_after_the_advertised_time(leased: Pair, clock: ManualClock) -> None:
    """The engine advertises the TTL and frees a grace later, by itself."""
    await _first_turn(leased)
    _events, (pin,) = leased.decode.leased.pins.snapshot()
    assert pin.deadline_s == leased.decode.clock.now_s() + _TTL_S
    clock.advance(_TTL_S)
    await asyncio.sleep(0.05)
    assert leased.decode.pool_state().pinned_requests == 1
    clock.advance(PIN_GRACE_S)
    await eventually(lambda: _all_free(leased.decode))
    assert len(leased.decode.leased.pins) == 0


async def test_a_released_pin_goes_at_once_and_a_second_release_is_harmless(
    leased: Pair,
) -> None:
    """What the registry releases is free at the next step, once."""
    await _first_turn(leased)
    _events, (pin,) = leased.decode.leased.pins.snapshot()
    for _ in range(2):
        leased.decode.leased.release_requests.put(pin.handle.request_id)
        await eventually(lambda: _all_free(leased.decode))
    assert leased.decode.running


async def test_pins_stay_within_their_share_of_the_pool(
    start_engine: StartEngine, monolith: FakeEngine, http: aiohttp.ClientSession
) -> None:
    """Half of the pool may be pinned; a turn beyond that is answered and leaves nothing."""
    prefill = await start_engine("prefill", "leased")
    decode = await start_engine("decode", "leased", block_count=41)
    pair = Pair(prefill, decode, monolith, http)
    pinned = []
    for number in range(3):
        prompt = f"{number} " * 60
        pair.hand.turn_ids = {"tenant": "t", "conversation_id": str(number), "generation": 1}
        turn = await pair.hand.turn(prompt)
        assert turn.decode.text == await pair.truth(prompt)
        pinned.append(decode.pool_state().pinned_requests)
    assert pinned == [1, 2, 2]


async def test_decode_does_not_read_another_prompts_blocks(leased: Pair) -> None:
    """If prefill computed another prompt than decode has, decode recomputes and frees it."""
    prefill = await leased.hand.prefill_leg(_FIRST + "something else")
    digest = prefill.outcome["prompt_digest"]
    leased.hand.turn_ids = {"prompt_digest": digest}
    answer = await leased.hand.decode_leg(_FIRST, prefill.params)
    assert answer.text == await leased.truth(_FIRST)
    await eventually(lambda: _all_free(leased.prefill))


async def test_an_engine_whose_registry_is_absent_serves(
    start_engine: StartEngine, http: aiohttp.ClientSession, monolith: FakeEngine
) -> None:
    """An agent that cannot connect does not touch the engine, which starts and stops as usual."""
    engine = await start_engine("decode", "leased", registry_address="127.0.0.1:9")
    pair = Pair(engine, engine, monolith, http)
    answer = await pair.hand.complete(engine.url, _FIRST)
    assert answer.text == await pair.truth(_FIRST)
