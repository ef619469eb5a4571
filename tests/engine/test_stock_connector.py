"""The same handle in vLLM's own connector: HTTP 200, and another history's KV."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from kvtide.local.fleet import LocalFleet
from kvtide.runtime.engine_command import ConnectorKind
from tests.fakes.by_hand import ByHand
from tests.suite.conversation import LOGPROB_TOLERANCE, salted_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.engine.conftest import Engines
    from tests.suite.cpu_fleet import CpuFleet

_HISTORY = 1_000


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def stock(fleet: CpuFleet) -> AsyncIterator[str]:
    """URL of a prefill engine with vLLM's own connector, beside the fleet."""
    local = LocalFleet(
        fleet.local.model_dir,
        decode=0,
        services=False,
        engine={
            "connector": ConnectorKind.STOCK,
            "prefix_caching": False,
            "max_model_len_tokens": fleet.max_model_len_tokens,
        },
        log_dir=Path("build/logs/stock"),
    )
    await asyncio.to_thread(local.start)
    yield local.engine("prefill-0").url
    await asyncio.to_thread(local.stop)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda h: h[:300] + "x" * 30 + h[330:], id="middle-edited"),
        pytest.param(lambda h: "~" + h[1:], id="first-token-edited"),
        pytest.param(lambda h: h[:700], id="shorter-prompt"),
        pytest.param(lambda h: h[:900] + "then it went another way " * 9, id="fork"),
    ],
)
async def test_upstream_answers_wrongly_where_kvtide_does_not(
    engines: Engines,
    stock: str,
    reference: Callable[..., Any],
    edit: Callable[[str], str],
    request: pytest.FixtureRequest,
) -> None:
    """One history, one handle, two connectors: ours answers as the monolith, stock does not."""
    name = request.node.name

    async def turn(prefill_url: str, salt: str) -> tuple[Any, str]:
        # Each with a lease of its own: a read spends it. The same texts, though.
        history, claimed = await engines.claimed_turn(salt + name, salted_text(_HISTORY, name))
        prompt = edit(history)
        engines.turn_ids = {}
        hand = ByHand(engines.http, prefill_url, engines.decode_url, engines.model)
        # Without a salt of its own the local prefix cache of decode would hide the damage.
        turn = await hand.turn(prompt, claimed.params(), cache_salt=salt + name)
        return turn.decode, prompt

    ours, prompt = await turn(engines.prefill_url, "ours")
    theirs, same_prompt = await turn(stock, "theirs")
    assert prompt == same_prompt
    right = await reference(prompt)
    assert (ours.status, ours.text) == (200, right.text)
    assert _distance(ours, right) < LOGPROB_TOLERANCE
    assert theirs.status == 200
    assert theirs.text != right.text or _distance(theirs, right) > 10 * LOGPROB_TOLERANCE
    await engines.close_conversation("ours" + name)
    await engines.close_conversation("theirs" + name)


def _distance(one: Any, other: Any) -> float:
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))
