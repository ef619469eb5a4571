"""What breaks between fake engines with upstream's connector, and what stays behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.fakes.by_hand import ByHand
from tests.fakes.engine import EngineConfig
from tests.fakes.engine.process import EngineProcess
from tests.fakes.waiting import eventually

if TYPE_CHECKING:
    from kvtide.runtime.clock import ManualClock
    from tests.fakes.engine import FakeEngine
    from tests.fakes_tests.conftest import Pair, StartEngine

_PROMPT = "A prompt that takes several blocks of sixteen tokens each. " * 4


def _all_free(engine: FakeEngine) -> bool:
    pool = engine.pool_state()
    return pool.free_blocks == pool.total_blocks and not engine.core.requests


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_restarted_decode_engine_refuses_its_old_handles(stock: Pair) -> None:
    """A handle of the engine before fails its handshake, and the READ that skips it too."""
    turn = await stock.hand.turn(_PROMPT)
    known = await stock.hand.turn(_PROMPT + "again", turn.decode.params)
    old_id = stock.decode.engine_id
    await stock.decode.restart()
    assert stock.decode.engine_id != old_id
    answer = await stock.hand.prefill_leg(_PROMPT + "more", known.decode.params)
    assert answer.status == 500
    assert stock.prefill.metrics.value("vllm:nixl_num_failed_transfers_total") == 1
    fresh = await stock.hand.turn(_PROMPT)
    assert fresh.decode.text == await stock.truth(_PROMPT)
    assert stock.decode.unsafe_reads == 0


async def test_a_kill_resets_connections_and_the_port_comes_back(stock: Pair) -> None:
    """A request in flight is cut off; the restarted engine serves on the same URL."""
    stock.decode.faults.step_gate.clear()
    leg = asyncio.create_task(stock.hand.complete(stock.decode.url, _PROMPT))
    await eventually(lambda: bool(stock.decode.core.waiting))
    url = stock.decode.url
    await stock.decode.kill()
    with pytest.raises(aiohttp.ClientError):
        await leg
    with pytest.raises(aiohttp.ClientError):
        await stock.hand.complete(url, _PROMPT)
    await stock.decode.restart()
    assert stock.decode.url == url
    assert (await stock.hand.complete(url, _PROMPT)).text == await stock.truth(_PROMPT)


async def test_an_engine_that_hangs_accepts_and_answers_when_it_goes_on(stock: Pair) -> None:
    """A stopped process takes connections; the answer comes once it runs again."""
    stock.decode.hang()
    leg = asyncio.create_task(stock.hand.complete(stock.decode.url, _PROMPT))
    await asyncio.sleep(0.1)
    assert not leg.done()
    stock.decode.resume()
    assert (await leg).text == await stock.truth(_PROMPT)


@pytest.mark.parametrize("fault", ["kill_after_tokens", "crash_after_tokens"])
async def test_an_engine_can_die_in_the_middle_of_an_answer(stock: Pair, fault: str) -> None:
    """A killed engine breaks the stream off; a crashed core says so in a last event."""
    setattr(stock.decode.faults, fault, 3)
    stock.decode.faults.token_delay_s = 0.01
    body = {"prompt": _PROMPT, "stream": True, "max_tokens": 30}
    received = b""
    broken = False
    url = f"{stock.decode.url}/v1/completions"
    try:
        async with stock.hand.http.post(url, json=body) as response:
            async for chunk in response.content.iter_any():
                received += chunk
    except aiohttp.ClientError:
        broken = True
    killed = fault == "kill_after_tokens"
    assert broken == killed
    assert (b"InternalServerError" in received) != killed
    assert (b"[DONE]" in received) != killed
    await eventually(lambda: not stock.decode.running)


async def test_a_client_that_leaves_between_the_legs_leaves_blocks_for_30_s(
    stock: Pair, clock: ManualClock
) -> None:
    """Nobody reads what prefill kept: its own lease frees it."""
    await stock.hand.prefill_leg(_PROMPT)
    assert stock.prefill.pool_state().pinned_requests == 1
    clock.advance(30)
    await eventually(lambda: _all_free(stock.prefill))


@pytest.mark.parametrize("where", ["waiting", "loading", "generating"])
async def test_a_client_that_leaves_during_decode_frees_both_engines(
    stock: Pair, clock: ManualClock, where: str
) -> None:
    """Before the load, in the middle of it, or while tokens come: nothing stays pinned."""
    prefill = await stock.hand.prefill_leg(_PROMPT)
    if where == "waiting":
        stock.decode.faults.step_gate.clear()
    elif where == "loading":
        stock.prefill.faults.read_gate.clear()
    else:
        stock.decode.faults.token_delay_s = 0.02
    leg = asyncio.create_task(stock.hand.decode_leg(_PROMPT, prefill.params, max_tokens=1_000))
    core = stock.decode.core
    if where == "waiting":
        await eventually(lambda: bool(core.waiting))
    elif where == "loading":
        await eventually(lambda: core.steps > 2 and bool(core.waiting))
    else:
        await eventually(lambda: bool(core.running))
    await _cancel(leg)
    await eventually(lambda: not (core.waiting or core.running))
    if where == "loading":
        # The transfer is still writing into them: not anyone's yet.
        assert not _all_free(stock.decode)
    stock.decode.faults.clear()
    stock.prefill.faults.clear()
    await eventually(lambda: _all_free(stock.decode))
    await eventually(lambda: _all_free(stock.prefill))
    assert stock.prefill.unsafe_reads == 0


async def test_a_decode_leg_refused_at_admission_frees_prefill(stock: Pair) -> None:
    """On 0.32 decode tells prefill when the request that was to read is refused."""
    prefill = await stock.hand.prefill_leg(_PROMPT)
    answer = await stock.hand.decode_leg(_PROMPT, prefill.params, temperature=9)
    assert answer.status == 400
    await eventually(lambda: _all_free(stock.prefill))


@pytest.mark.parametrize("fault", ["refuse_handshakes", "refuse_reads", "fail_next_reads"])
async def test_a_failed_load_on_decode_is_an_error_or_recomputed_by_policy(
    start_engine: StartEngine, monolith: FakeEngine, http: aiohttp.ClientSession, fault: str
) -> None:
    """Policy fail answers 500; policy recompute gives the right answer; neither leaks on decode."""
    prefill = await start_engine("prefill")
    setattr(prefill.faults, fault, 10)
    for policy, status in (("fail", 500), ("recompute", 200)):
        decode = await start_engine("decode", load_failure_policy=policy)
        hand = ByHand(http, prefill.url, decode.url)
        turn = await hand.turn(_PROMPT)
        assert turn.decode.status == status
        if status == 200:
            assert turn.decode.text == (await hand.complete(monolith.url, _PROMPT)).text
            assert decode.pool_state().pinned_requests == 1
        else:
            assert _all_free(decode)
        assert decode.metrics.value("vllm:nixl_num_failed_transfers_total") == 1


async def test_one_pair_can_be_broken_while_the_others_work(
    start_engine: StartEngine, http: aiohttp.ClientSession
) -> None:
    """Decode 2 cannot read from prefill 1; every other pair can."""
    prefills = [await start_engine("prefill") for _ in range(2)]
    decodes = [await start_engine("decode") for _ in range(2)]
    prefills[0].faults.refuse_reads_from = {decodes[1].config.node_id}
    statuses = {
        (p, d): (await ByHand(http, prefills[p].url, decodes[d].url).turn(_PROMPT)).decode.status
        for p in range(2)
        for d in range(2)
    }
    assert statuses == {(0, 0): 200, (0, 1): 500, (1, 0): 200, (1, 1): 200}


async def test_engines_of_different_versions_refuse_each_other(
    start_engine: StartEngine, http: aiohttp.ClientSession
) -> None:
    """The handshake compares a hash before anything else."""
    prefill = await start_engine("prefill")
    decode = await start_engine("decode", vllm_version="0.33.0")
    assert (await ByHand(http, prefill.url, decode.url).turn(_PROMPT)).decode.status == 500


async def test_a_lost_notification_costs_time_not_correctness(
    stock: Pair, clock: ManualClock
) -> None:
    """Blocks whose completion message is lost stay until their deadline."""
    stock.prefill.faults.drop_notifications = True
    turn = await stock.hand.turn(_PROMPT)
    assert turn.decode.text == await stock.truth(_PROMPT)
    assert stock.prefill.pool_state().pinned_requests == 1
    clock.advance(30)
    await eventually(lambda: _all_free(stock.prefill))


async def test_a_send_that_is_reported_twice_kills_the_engine(stock: Pair) -> None:
    """The core asserts that a finished send is known; the second report brings the engine down."""
    stock.prefill.faults.report_sent_twice = 1
    prefill = await stock.hand.prefill_leg(_PROMPT)
    await stock.hand.decode_leg(_PROMPT, prefill.params)
    await eventually(lambda: not stock.prefill.running)
    assert "sent twice" in str(stock.prefill.core.dead)


async def test_a_read_that_starts_in_time_and_ends_too_late_is_wrong_and_counted(
    stock: Pair, clock: ManualClock
) -> None:
    """Blocks expire and are reused while the READ is on its way: this is what leases are for."""
    turn = await stock.hand.turn(_PROMPT)
    stock.decode.faults.read_gate.clear()
    prompt = _PROMPT + turn.decode.text + "more"
    leg = asyncio.create_task(stock.hand.prefill_leg(prompt, turn.decode.params, cache_salt="own"))
    await eventually(lambda: stock.prefill.core.steps > 0 and bool(stock.prefill.core.waiting))
    await asyncio.sleep(0.05)
    clock.advance(480)
    await eventually(lambda: _all_free(stock.decode))
    size = stock.decode.pool_state().total_blocks * 16 - 20
    await stock.hand.complete(stock.decode.url, "z" * size)
    stock.decode.faults.read_gate.set()
    prefill = await leg
    answer = await stock.hand.decode_leg(prompt, prefill.params, cache_salt="own")
    assert answer.text != await stock.truth(prompt)
    await eventually(lambda: stock.decode.unsafe_reads == 1)


async def test_an_engine_process_can_be_killed_stopped_and_restarted(
    http: aiohttp.ClientSession,
) -> None:
    """The same engine in a process of its own: real signals, same ports, a new engine id."""
    engine = EngineProcess(EngineConfig(node_id="alone", role="monolith", connector="none"))
    await engine.start()
    try:
        hand = ByHand(http, engine.url, engine.url)
        before = await hand.complete(engine.url, _PROMPT)
        url, engine_id = engine.url, engine.engine_id
        await engine.kill()
        with pytest.raises(aiohttp.ClientError):
            await hand.complete(url, _PROMPT)
        await engine.start()
        assert (engine.url, engine.engine_id != engine_id) == (url, True)
        engine.hang()
        waiting = asyncio.create_task(hand.complete(url, _PROMPT))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        engine.resume()
        assert (await waiting).text == before.text
        async with http.post(f"{url}/fake/faults", json={"fail_next_requests": 1}):
            pass
        assert (await hand.complete(url, _PROMPT)).status == 500
        async with http.get(f"{url}/fake/pool") as response:
            pool = await response.json()
        assert pool["free_blocks"] == pool["total_blocks"]
    finally:
        await engine.stop()
