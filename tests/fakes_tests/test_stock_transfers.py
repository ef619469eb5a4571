"""Upstream's connector on the fake engines: what vLLM 0.32 does right, and what it does not."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.by_hand import ByHand
from tests.fakes.waiting import eventually
from tests.fakes_tests.conftest import Pair

if TYPE_CHECKING:
    import aiohttp

    from kvtide.runtime.clock import ManualClock
    from tests.fakes.engine import FakeEngine
    from tests.fakes_tests.conftest import StartEngine

_FIRST = "The first turn of a conversation of some length. " * 6
_TTL_S = 480.0


def _all_free(engine: FakeEngine) -> bool:
    pool = engine.pool_state()
    return pool.free_blocks == pool.total_blocks and not engine.core.requests


async def _first_turn(pair: Pair, prompt: str = _FIRST) -> tuple[str, dict[str, Any]]:
    """The history after one turn, and decode's handle for it."""
    turn = await pair.hand.turn(prompt)
    assert turn.decode.text == await pair.truth(prompt)
    return prompt + turn.decode.text, turn.decode.params


async def test_an_extended_history_is_pulled_and_right(stock: Pair) -> None:
    """The second turn reads the first one's blocks, frees them, and answers as the monolith."""
    history, handle = await _first_turn(stock)
    assert stock.decode.pool_state().pinned_requests == 1
    second = await stock.hand.turn(history + "And then?", handle)
    assert second.decode.text == await stock.truth(history + "And then?")
    usage = second.prefill.body["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == handle["remote_num_tokens"]
    # The second turn's blocks are pinned, the first one's are not.
    assert stock.decode.pool_state().pinned_requests == 1
    assert await eventually(lambda: _all_free(stock.prefill))
    assert stock.decode.unsafe_reads == 0


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda h: h[:100] + "x" * 30 + h[130:] + "more", id="middle-edited"),
        pytest.param(lambda h: "x" + h[1:] + "more", id="first-token-edited"),
        pytest.param(lambda h: h[:150], id="shorter-prompt"),
        pytest.param(lambda h: h[:210] + "another way this went" * 8, id="fork"),
    ],
)
async def test_another_history_is_answered_wrongly(stock: Pair, edit: Any) -> None:
    """Upstream trusts the handle's length: HTTP 200, and somebody else's answer."""
    history, handle = await _first_turn(stock)
    prompt = edit(history)
    turn = await stock.hand.turn(prompt, handle, cache_salt="own")
    assert turn.decode.status == 200
    assert turn.decode.text != await stock.truth(prompt)


async def test_a_handle_cut_to_the_common_prefix_is_right(stock: Pair) -> None:
    """Block ids and token count cut together, by hand, repair the edited history."""
    history, handle = await _first_turn(stock)
    prompt = history[:100] + "x" * 30 + history[130:] + "more"
    blocks = 100 // 16
    cut = handle | {
        "remote_block_ids": [handle["remote_block_ids"][0][:blocks]],
        "remote_num_tokens": blocks * 16,
    }
    turn = await stock.hand.turn(prompt, cut, cache_salt="own")
    assert turn.decode.text == await stock.truth(prompt)


async def test_blocks_cut_without_the_count_kill_the_reader(stock: Pair) -> None:
    """Fewer remote blocks than the count promises fail an assertion in prefill's step."""
    history, handle = await _first_turn(stock)
    short = handle | {"remote_block_ids": [handle["remote_block_ids"][0][:2]]}
    answer = await stock.hand.prefill_leg(history + "more", short)
    assert answer.status == 500
    await eventually(lambda: not stock.prefill.running)


async def test_fewer_missing_tokens_than_the_threshold_are_recomputed(
    start_engine: StartEngine, monolith: FakeEngine, http: aiohttp.ClientSession
) -> None:
    """Below 64 tokens prefill computes and still has decode free; at 64 it pulls."""
    for tokens, cached in ((63, 0), (64, 64)):
        prefill = await start_engine("prefill", prefix_caching=False)
        decode = await start_engine("decode")
        pair = Pair(prefill, decode, monolith, http)
        prompt = "a" * (tokens + 1 - 16)
        history, handle = await _first_turn(pair, prompt)
        assert handle["remote_num_tokens"] == tokens
        answer = await pair.hand.prefill_leg(history + "more", handle)
        assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        await eventually(partial(_all_free, decode))


async def test_what_prefill_has_itself_is_not_pulled_and_still_frees_decode(
    start_engine: StartEngine, monolith: FakeEngine, http: aiohttp.ClientSession
) -> None:
    """A full local hit only notifies; a partial one pulls the missing suffix."""
    prefill = await start_engine("prefill")
    decode = await start_engine("decode")
    pair = Pair(prefill, decode, monolith, http)
    prompt = "b" * 200
    history, handle = await _first_turn(pair, prompt)
    # The prompt's 12 whole blocks are cached, and of the answer too little is missing.
    second = await pair.hand.turn(history + "more", handle)
    assert second.decode.text == await pair.truth(history + "more")
    assert second.prefill.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert prefill.metrics.value("vllm:nixl_bytes_transferred_count") == 0
    history += "more" + second.decode.text
    third = history + "and more" * 20
    turn = await pair.hand.turn(third, second.decode.params)
    assert turn.decode.text == await pair.truth(third)


async def test_decode_reports_what_prefill_had_cached(stock: Pair) -> None:
    """On 0.32 decode's cached_tokens are prefill's, not the 100 % that it pulled."""
    history, handle = await _first_turn(stock)
    turn = await stock.hand.turn(history + "more", handle)
    for leg in (turn.prefill, turn.decode):
        details = leg.body["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == handle["remote_num_tokens"]


async def test_blocks_go_when_their_time_is_up(stock: Pair, clock: ManualClock) -> None:
    """Decode frees on its own clock, counts the expiry, and needs nobody for it."""
    await _first_turn(stock)
    clock.advance(_TTL_S - 1)
    await asyncio.sleep(0.05)
    assert stock.decode.pool_state().pinned_requests == 1
    clock.advance(1)
    await eventually(lambda: _all_free(stock.decode))
    assert stock.decode.metrics.value("vllm:nixl_num_kv_expired_reqs_total") == 1


@pytest.mark.parametrize(("left_s", "status"), [(5.5, 200), (4.5, 500)])
async def test_a_read_close_to_the_deadline_is_declined(
    stock: Pair, clock: ManualClock, left_s: float, status: int
) -> None:
    """Prefill declines within 5 s of the deadline, by decode's clock, which is hours apart."""
    history, handle = await _first_turn(stock)
    clock.advance(_TTL_S - left_s)
    answer = await stock.hand.prefill_leg(history + "more", handle)
    assert answer.status == status
    assert stock.decode.unsafe_reads == 0
    if status == 500:
        assert answer.body["error"]["type"] == "InternalServerError"


async def test_without_an_expiry_a_late_read_gets_somebody_elses_blocks(
    stock: Pair, clock: ManualClock
) -> None:
    """An absent deadline is an unchecked read: wrong answer, HTTP 200, and one unsafe read."""
    history, handle = await _first_turn(stock)
    clock.advance(_TTL_S + 1)
    await eventually(lambda: _all_free(stock.decode))
    pool = stock.decode.pool_state().total_blocks
    await stock.hand.complete(stock.decode.url, "z" * (pool * 16 - 20))
    unchecked = {key: v for key, v in handle.items() if key != "remote_blocks_expiry_time"}
    turn = await stock.hand.turn(history + "more", unchecked, cache_salt="own")
    assert turn.decode.text != await stock.truth(history + "more")
    assert stock.decode.unsafe_reads == 1


async def test_a_handle_is_good_for_one_read(stock: Pair) -> None:
    """The first completed read frees; a second one is unsafe and counted."""
    history, handle = await _first_turn(stock)
    for unsafe in (0, 1):
        await stock.hand.prefill_leg(history + f"more {unsafe}", handle)
        await eventually(lambda: stock.decode.pool_state().pinned_requests == 0)
        assert stock.decode.unsafe_reads == unsafe


async def test_prefill_keeps_blocks_30_s_and_decode_prolongs_while_it_waits(
    stock: Pair, clock: ManualClock
) -> None:
    """Prefill's lease ends by itself, unless a request that waits on decode heartbeats."""
    prefill = await stock.hand.prefill_leg(_FIRST)
    clock.advance(29)
    stock.decode.faults.step_gate.clear()
    leg = asyncio.create_task(stock.hand.decode_leg(_FIRST, prefill.params))
    await eventually(lambda: bool(stock.decode.core.waiting))
    # Its first step heartbeats at once, but the read that follows waits.
    stock.prefill.faults.read_gate.clear()
    stock.decode.faults.step_gate.set()
    nixl = stock.prefill.nixl
    assert nixl is not None
    prolonged_s = stock.prefill.clock.now_s() + 30
    await eventually(lambda: list(nixl.worker.pinned_until_s.values()) == [prolonged_s])
    clock.advance(20)
    await asyncio.sleep(0.05)
    assert stock.prefill.pool_state().pinned_requests == 1
    stock.prefill.faults.read_gate.set()
    assert (await leg).text == await stock.truth(_FIRST)
    await stock.hand.prefill_leg(_FIRST)
    clock.advance(31)
    await eventually(lambda: _all_free(stock.prefill))


async def test_a_declined_readback_hangs_under_the_recompute_policy(
    start_engine: StartEngine, clock: ManualClock, monolith: FakeEngine, http: aiohttp.ClientSession
) -> None:
    """The second match promises a load that is never started: the request never returns."""
    prefill = await start_engine("prefill", prefix_caching=False, load_failure_policy="recompute")
    pair = Pair(prefill, await start_engine("decode"), monolith, http)
    history, handle = await _first_turn(pair)
    clock.advance(_TTL_S - 1)
    leg = asyncio.create_task(pair.hand.prefill_leg(history + "more", handle))
    await eventually(lambda: bool(prefill.core.waiting))
    steps = prefill.core.steps
    await eventually(lambda: prefill.core.steps > steps + 20)
    assert not leg.done()
    leg.cancel()
    await asyncio.gather(leg, return_exceptions=True)


@pytest.mark.parametrize("how", ["preempted", "not-bidirectional"])
async def test_the_same_hang_has_other_causes(
    start_engine: StartEngine, monolith: FakeEngine, http: aiohttp.ClientSession, how: str
) -> None:
    """A preemption after the load, and a prefill that cannot read back, hang as well."""
    prefill = await start_engine(
        "prefill", prefix_caching=False, bidirectional=how != "not-bidirectional"
    )
    prefill.faults.preempt_after_load = int(how == "preempted")
    pair = Pair(prefill, await start_engine("decode"), monolith, http)
    history, handle = await _first_turn(pair)
    leg = asyncio.create_task(pair.hand.prefill_leg(history + "more", handle))
    await eventually(lambda: bool(prefill.core.waiting))
    steps = prefill.core.steps
    await eventually(lambda: prefill.core.steps > steps + 20)
    assert not leg.done()
    leg.cancel()
    await asyncio.gather(leg, return_exceptions=True)


async def test_a_turn_that_ends_by_a_stop_text_pins_nothing(stock: Pair) -> None:
    """Stop texts are found outside the core, which sees an abort: there is no handle."""
    text = await stock.truth(_FIRST)
    turn = await stock.hand.turn(_FIRST, stop=[text[4:7]])
    assert turn.decode.body["choices"][0]["finish_reason"] == "stop"
    assert turn.decode.body["kv_transfer_params"] is None
    await eventually(lambda: _all_free(stock.decode))


@pytest.mark.parametrize("newer", [False, True])
async def test_only_0_33_puts_the_handle_on_a_streams_finish_chunk(
    start_engine: StartEngine, http: aiohttp.ClientSession, *, newer: bool
) -> None:
    """A streamed turn's handle is on the last chunk in 0.33, and nowhere in 0.32."""
    prefill = await start_engine("prefill")
    decode = await start_engine("decode", params_in_stream=newer)
    params = (await ByHand(http, prefill.url, decode.url).prefill_leg(_FIRST)).params
    body = {"prompt": _FIRST, "stream": True, "max_tokens": 4, "kv_transfer_params": params}
    async with http.post(f"{decode.url}/v1/completions", json=body) as response:
        events = (await response.read()).split(b"\n\n")
    with_params = [b"kv_transfer_params" in event for event in events if event]
    assert with_params == [False, False, False, newer, False]
