"""The NodeHealth contract, in this process and over gRPC: the caller can't tell."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from kvtide.health import NodeLoad, NodeState
from kvtide.runtime import Unavailable
from tests.health.conftest import WAIT_S
from tests.health.support import LOAD, make_info

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from kvtide.health import Node
    from tests.health.conftest import Harness


async def following(fleets: AsyncGenerator[list[Node], None]) -> list[Node]:
    return await asyncio.wait_for(anext(fleets), WAIT_S)


def states(nodes: list[Node]) -> dict[str, NodeState]:
    return {node.info.node_id: node.state for node in nodes}


async def test_an_empty_fleet(harness: Harness) -> None:
    """Without engines there are no nodes, and a watch says so at once."""
    assert await harness.health.list_nodes() == []
    async with aclosing(harness.health.watch()) as fleets:
        assert await following(fleets) == []


async def test_list_shows_everything_that_was_reported(harness: Harness) -> None:
    """All facts of a node, its load and its silence arrive unchanged."""
    await harness.node(make_info("decode-2"))
    await harness.node(make_info("decode-1"), up=False)
    harness.clock.advance(1.5)
    first, second = await harness.health.list_nodes()
    assert (first.info, second.info) == (make_info("decode-1"), make_info("decode-2"))
    assert (first.state, second.state) == (NodeState.STARTING, NodeState.READY)
    assert first.load == LOAD
    assert first.silent_s == 1.5


async def test_watch_sends_the_whole_fleet_after_each_change(harness: Harness) -> None:
    """A watcher sees nodes appear, change their state, restart and go."""
    async with aclosing(harness.health.watch()) as fleets:
        assert await following(fleets) == []
        one = await harness.node(make_info("n1"), up=False)
        assert states(await following(fleets)) == {"n1": NodeState.STARTING}
        await one.beat(up=True)
        assert states(await following(fleets)) == {"n1": NodeState.READY}
        await harness.node(make_info("n2"))
        assert states(await following(fleets)) == {"n1": NodeState.READY, "n2": NodeState.READY}
        await one.hang_up()
        assert states(await following(fleets))["n1"] is NodeState.SUSPECT
        await harness.node(make_info("n1", "epoch-b"))
        fleet = await following(fleets)
        assert fleet[0].info.epoch == "epoch-b"
        harness.clock.advance(700.0)
        harness.local.sweep_now()
        assert await following(fleets) == []


async def test_watch_coalesces_what_the_caller_did_not_read(harness: Harness) -> None:
    """A slow watcher of this process gets the fleet as it is, not every step on the way."""
    async with aclosing(harness.local.watch()) as fleets:
        await following(fleets)
        node = await harness.node(up=False)
        for number in range(10):
            await node.beat(up=number % 2 == 0)
        await node.beat(up=True, load=NodeLoad(free_blocks=7))
        await harness.until(lambda: harness.now()[0].load.free_blocks == 7)
        assert (await following(fleets))[0].load.free_blocks == 7
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(fleets), 0.05)


async def test_new_loads_reach_watchers_with_the_next_sweep(harness: Harness) -> None:
    """A heartbeat that changes nothing but the load is passed on, many of them at once."""
    node = await harness.node()
    harness.local.sweep_now()
    async with aclosing(harness.health.watch()) as fleets:
        await following(fleets)
        for blocks in (5, 4, 3):
            await node.beat(load=NodeLoad(free_blocks=blocks))
        await harness.until(lambda: harness.now()[0].load.free_blocks == 3)
        harness.local.sweep_now()
        assert (await following(fleets))[0].load.free_blocks == 3


async def test_silence_is_noticed_without_being_asked(harness: Harness) -> None:
    """Once started, node health notices by itself that a node fell silent."""
    await harness.node()
    async with aclosing(harness.health.watch()) as fleets:
        assert states(await following(fleets)) == {"decode-1": NodeState.READY}
        await harness.local.start()
        harness.clock.advance(4.0)
        async with asyncio.timeout(WAIT_S):
            while states(await anext(fleets)) != {"decode-1": NodeState.SUSPECT}:
                pass


async def test_several_watchers(harness: Harness) -> None:
    """Every watcher gets every change."""
    async with (
        aclosing(harness.health.watch()) as one,
        aclosing(harness.health.watch()) as two,
    ):
        await following(one)
        await following(two)
        await harness.node()
        assert len(await following(one)) == len(await following(two)) == 1


async def test_a_stopped_service_is_unavailable(harness: Harness) -> None:
    """A health service that stops, and that nobody ever heard of, gives an error."""
    await harness.local.stop()
    with pytest.raises(Unavailable):
        await harness.health.list_nodes()
