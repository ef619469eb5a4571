"""Engines that fail in the middle of things: an honest error, or a recompute."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from kvtide.runtime import HealthSettings
from tests.fakes.waiting import eventually
from tests.suite.control_plane import CLAIM_LIMIT_S, SETTINGS
from tests.suite.conversation import salted_text
from tests.suite.fake_fleet import FakeFleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.fakes.engine import EngineConfig
    from tests.suite.conversation import Conversation
    from tests.suite.fleets import Role

    Converse = Callable[..., Conversation]

pytestmark = pytest.mark.fake_only


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def _no_faults_left(fleet: FakeFleet) -> AsyncIterator[None]:
    yield
    fleet.clear_faults()
    for engine in (fleet.prefill, fleet.decode):
        if not engine.running:
            await fleet.restart_engine("prefill" if engine is fleet.prefill else "decode")


@pytest.mark.parametrize("fault", ["refuse_handshakes", "refuse_reads", "fail_next_reads"])
async def test_a_failed_readback_is_recomputed(
    converse: Converse, fleet: FakeFleet, salt: str, fault: str
) -> None:
    """Ports answer and transfers fail: the turn is plain prefill, says why, and is right."""
    await fleet.restart_engine("prefill")
    conversation = converse(stream=True)
    await conversation.turn(salted_text(300, salt))
    setattr(fleet.decode.faults, fault, 1)
    answer = await conversation.turn("go on")
    assert answer.report["reuse"] == "transfer_failed"
    assert answer.report["recomputed_tokens"] == answer.usage["prompt_tokens"]
    fleet.clear_faults()
    assert (await conversation.turn("go on")).report["reuse"] == "pulled"
    # Whether the failed read had got through nobody can tell, so its lease waits for its claim.
    await fleet.sit_out(CLAIM_LIMIT_S + 1)


async def test_the_reason_is_counted_and_kept(
    converse: Converse, fleet: FakeFleet, salt: str
) -> None:
    """The router's metrics and its turn history say how often, and why, nothing was pulled."""
    conversation = converse()
    await conversation.turn(salted_text(300, salt))
    conversation.history[0]["content"] = "~" + conversation.history[0]["content"]
    answer = await conversation.turn("go on")
    assert answer.report["reuse"] == "history_changed"
    async with conversation.http.get(f"{fleet.base_url}/metrics") as response:
        metrics = await response.text()
    counts = [line for line in metrics.splitlines() if _is_count(line, "history_changed")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in counts) >= 1
    async with conversation.http.get(f"{fleet.base_url}/kvtide/turns") as response:
        turns = (await response.json())["turns"]
    assert answer.report.items() <= turns[-1].items()


def _is_count(line: str, reuse: str) -> bool:
    return line.startswith("kvtide_router_turns_total{") and f'reuse="{reuse}"' in line


async def test_a_prefill_leg_that_fails_with_a_handle_is_tried_without(
    converse: Converse, fleet: FakeFleet, salt: str
) -> None:
    """HTTP 500 on the leg that was to read back: one plain try, and the answer is right."""
    conversation = converse()
    await conversation.turn(salted_text(300, salt))
    fleet.prefill.faults.fail_next_requests = 1
    answer = await conversation.turn("go on")
    assert answer.report["reuse"] == "prefill_failed"
    assert answer.report["pulled_tokens"] == 0
    assert (await conversation.turn("go on")).report["reuse"] == "pulled"
    await fleet.sit_out(CLAIM_LIMIT_S + 1)


async def test_decode_killed_during_the_readback(
    converse: Converse, fleet: FakeFleet, salt: str
) -> None:
    """Prefill's read breaks off; there is nobody to decode; after the restart all is well."""
    conversation = converse()
    await conversation.turn(salted_text(300, salt))
    conversation.say("go on")
    fleet.decode.faults.read_gate.clear()
    sent = asyncio.create_task(conversation.send())
    await eventually(lambda: bool(fleet.prefill.core.waiting))
    await fleet.decode.kill()
    assert (await sent).status in (502, 503)
    await fleet.restart_engine("decode")
    assert (await conversation.turn()).report["pulled_tokens"] == 0
    assert (await conversation.turn("go on")).report["reuse"] == "pulled"
    # What prefill kept for the turn that failed goes by its own lease.
    await fleet.outlast_prefill()


async def test_prefill_killed_during_the_readback(
    converse: Converse, fleet: FakeFleet, salt: str
) -> None:
    """The leg breaks off and cannot be tried elsewhere; after the restart all is well."""
    conversation = converse()
    await conversation.turn(salted_text(300, salt))
    conversation.say("go on")
    fleet.decode.faults.read_gate.clear()
    sent = asyncio.create_task(conversation.send())
    await eventually(lambda: bool(fleet.prefill.core.waiting))
    await fleet.prefill.kill()
    fleet.decode.faults.read_gate.set()
    assert (await sent).status in (502, 503)
    await fleet.restart_engine("prefill")
    await conversation.turn()
    assert (await conversation.turn("go on")).report["reuse"] == "pulled"
    await fleet.sit_out(CLAIM_LIMIT_S + 1)


@pytest.mark.parametrize("fault", ["kill_after_tokens", "crash_after_tokens"])
async def test_decode_that_dies_mid_stream_ends_the_stream_with_an_error(
    converse: Converse, fleet: FakeFleet, salt: str, fault: str
) -> None:
    """The client sees an error event: half an answer does not look like a whole one."""
    conversation = converse(stream=True)
    conversation.say(salted_text(300, salt))
    setattr(fleet.decode.faults, fault, 5)
    fleet.decode.faults.token_delay_s = 0.01
    answer = await conversation.send(max_tokens=50)
    assert answer.status == 200
    assert answer.error["message"]
    assert answer.finish_reason is None
    if fault == "kill_after_tokens":
        # A crashed vLLM says [DONE] itself after its error, and that is relayed.
        assert not answer.done
    async with conversation.http.get(f"{fleet.base_url}/kvtide/turns") as response:
        assert (await response.json())["turns"][-1]["status"] == "failed"
    conversation.history.pop()
    await eventually(lambda: not fleet.decode.running)
    await fleet.restart_engine("decode")
    await conversation.turn()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_hangs_gets_no_turns(
    converse: Converse, salt: str, role: Role
) -> None:
    """Ports accept and nothing answers: without heartbeats no turn is placed there."""
    quick = HealthSettings(report_interval_s=0.1, suspect_after_missed=3, down_after_s=60.0)
    settings = SETTINGS.model_copy(update={"health": quick})
    async with FakeFleet(settings=settings) as own:
        conversation = converse(fleet=own)

        async def served() -> bool:
            status = (await conversation.send()).status
            if status == 200:
                conversation.history.pop()
            return status == 200

        conversation.say(salted_text(300, salt))
        await eventually(served)
        engine = own.prefill if role == "prefill" else own.decode
        engine.hang()

        def placed() -> bool:
            router = own.control.router
            assert router is not None
            states = {node.info.node_id: node.state for node in router.nodes}
            return states[engine.config.node_id] == "ready"

        await eventually(lambda: not placed())
        refused = await conversation.send()
        assert refused.status == 503
        engine.resume()
        await eventually(served)
        await conversation.turn()


async def test_it_works_the_same_when_streams_carry_the_handle(
    converse: Converse, salt: str
) -> None:
    """With engines like vLLM 0.33 nothing changes: one grant, and no handle gets out."""
    async with FakeFleet(params_in_stream=True, vllm_version="0.33.0") as newer:
        conversation = converse("chat", fleet=newer, stream=True)
        first = await conversation.turn(salted_text(300, salt))
        second = await conversation.turn("go on")
        assert second.report["pulled_tokens"] == first.kv_tokens
        assert "kv_transfer_params" not in str(second.chunks)
        assert len(newer.pins()) == 1


async def test_prefill_with_a_prefix_cache_pulls_only_what_it_lacks(
    converse: Converse, salt: str
) -> None:
    """What prefill has itself is not pulled: the report tells cached from pulled."""
    async with FakeFleet(block_size_tokens=16) as own:
        cached = own.prefill
        await cached.kill()
        cached.config = _with_cache(cached.config)
        await own.restart_engine("prefill")
        conversation = converse(fleet=own)
        await conversation.turn(salted_text(320, salt), 100)
        answer = await conversation.turn("go on")
        assert answer.report["cached_tokens"] == 320
        assert answer.report["pulled_tokens"] == 320 + 100 - 1 - 320
        assert answer.report["reuse"] == "pulled"
        # Too little is missing now, and that is recomputed.
        answer = await conversation.turn("and on")
        assert answer.report["reuse"] == "below_threshold"
        assert answer.report["cached_tokens"] > 400


def _with_cache(config: EngineConfig) -> EngineConfig:
    return replace(config, prefix_caching=True)
