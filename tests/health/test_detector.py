"""The failure detector: states from heartbeats, streams and silence."""

from __future__ import annotations

import pytest

from kvtide.health import HealthRules, NodeInfo, NodeLoad, NodeRole, NodeState
from kvtide.health.detector import NodeTable, rules_from_settings
from kvtide.runtime.errors import FailedPrecondition, InvalidArgument
from kvtide.runtime.settings import HealthSettings
from tests.health.support import LOAD, make_info

RULES = HealthRules()
STARTING, READY = NodeState.STARTING, NodeState.READY
SUSPECT, DOWN = NodeState.SUSPECT, NodeState.DOWN


class Driver:
    """A node table with a clock that the test moves."""

    def __init__(self, rules: HealthRules = RULES) -> None:
        self.now_s = 0.0
        self.table = NodeTable(rules)

    def register(self, stream: int = 1, *, info: NodeInfo | None = None, up: bool = True) -> bool:
        return self.table.register(
            info or make_info(), stream, LOAD, http_serving=up, now_s=self.now_s
        )

    def report(self, stream: int = 1, *, up: bool = True, load: NodeLoad = LOAD) -> bool:
        return self.table.report("decode-1", stream, load, http_serving=up, now_s=self.now_s)

    def broken(self, stream: int = 1) -> bool:
        return self.table.stream_broken("decode-1", stream, self.now_s)

    def advance(self, duration_s: float) -> bool:
        self.now_s += duration_s
        return self.table.sweep(self.now_s)

    def states(self) -> dict[str, NodeState]:
        return {node.info.node_id: node.state for node in self.table.nodes(self.now_s)}

    def state(self) -> NodeState:
        return self.states()["decode-1"]


@pytest.mark.parametrize(("up", "state"), [(True, READY), (False, STARTING)])
def test_ready_needs_a_serving_http_endpoint(*, up: bool, state: NodeState) -> None:
    """A node that reports is ready only once its HTTP endpoint answers."""
    driver = Driver()
    assert driver.register(up=up)
    assert driver.state() is state


def test_a_node_becomes_ready_and_stops_being_ready() -> None:
    """What the engine says of its endpoint moves it between starting and ready, both ways."""
    driver = Driver()
    driver.register(up=False)
    assert driver.report(up=True)
    assert driver.state() is READY
    assert not driver.report(up=True)
    assert driver.report(up=False)
    assert driver.state() is STARTING


@pytest.mark.parametrize(
    ("silent_s", "state"),
    [(0.0, READY), (2.9, READY), (3.0, SUSPECT), (11.9, SUSPECT), (12.0, DOWN), (611.9, DOWN)],
)
def test_silence(silent_s: float, state: NodeState) -> None:
    """Silence makes a node suspect after three missed heartbeats, and down after 12 s."""
    driver = Driver()
    driver.register()
    driver.advance(silent_s)
    assert driver.state() is state


def test_a_sweep_says_whether_anything_changed() -> None:
    """Only the sweep that changes a state says so."""
    driver = Driver()
    driver.register()
    changes = [driver.advance(1.0) for _ in range(14)]
    assert [second for second, changed in enumerate(changes, 1) if changed] == [3, 12]


@pytest.mark.parametrize("silent_s", [5.0, 20.0])
def test_a_heartbeat_brings_a_node_back(silent_s: float) -> None:
    """A node that was only slow is ready again with its next heartbeat."""
    driver = Driver()
    driver.register()
    driver.advance(silent_s)
    assert driver.report()
    assert driver.state() is READY


def test_a_broken_stream_is_suspect_at_once_and_down_in_time() -> None:
    """Without its stream a node gets no new turns, and counts as down after 12 s of silence."""
    driver = Driver()
    driver.register()
    driver.advance(1.0)
    assert driver.broken()
    assert driver.state() is SUSPECT
    driver.advance(10.9)
    assert driver.state() is SUSPECT
    driver.advance(0.1)
    assert driver.state() is DOWN


def test_a_new_stream_of_the_same_start_brings_a_node_back() -> None:
    """Reconnecting in the same epoch restores the node, whatever the old stream does then."""
    driver = Driver()
    driver.register(stream=1)
    driver.broken(stream=1)
    assert driver.register(stream=2)
    assert driver.state() is READY


def test_the_older_stream_is_ignored() -> None:
    """A replaced stream can neither report for the node nor make it suspect by ending."""
    driver = Driver()
    driver.register(stream=1)
    driver.register(stream=2)
    driver.advance(2.0)
    assert not driver.report(stream=1, load=NodeLoad(free_blocks=1))
    assert not driver.broken(stream=1)
    node = driver.table.nodes(driver.now_s)[0]
    assert (node.state, node.load, node.silent_s) == (READY, LOAD, 2.0)


def test_a_new_epoch_replaces_the_old_entry() -> None:
    """A restarted engine is one node with its new facts, not two."""
    driver = Driver()
    driver.register(stream=1)
    assert driver.register(stream=2, info=make_info(epoch="epoch-b"), up=False)
    assert driver.states() == {"decode-1": STARTING}
    assert driver.table.nodes(driver.now_s)[0].info.epoch == "epoch-b"


def test_a_leftover_process_is_refused_while_its_successor_reports() -> None:
    """An epoch that was replaced cannot take the node back, unless it is the only one left."""
    driver = Driver()
    driver.register(stream=1)
    driver.register(stream=2, info=make_info(epoch="epoch-b"))
    with pytest.raises(FailedPrecondition, match="epoch-b"):
        driver.register(stream=3)
    driver.broken(stream=2)
    assert driver.register(stream=4)
    assert driver.table.nodes(driver.now_s)[0].info.epoch == "epoch-a"


def test_changed_facts_in_the_same_epoch_are_a_change() -> None:
    """A node that reconnects with other facts, such as more models, is news to routers."""
    driver = Driver()
    driver.register(stream=1, info=make_info(role=NodeRole.DECODE))
    assert not driver.register(stream=2)
    assert driver.register(stream=3, info=make_info(role=NodeRole.PREFILL))


def test_a_down_node_is_forgotten_after_ten_minutes() -> None:
    """A node that stays down leaves the list, and comes back as new when it reports."""
    driver = Driver()
    driver.register()
    driver.advance(611.9)
    assert driver.states() == {"decode-1": DOWN}
    assert driver.advance(0.1)
    assert driver.states() == {}
    assert not driver.report()
    assert driver.register(stream=9)


def test_nodes_are_sorted_and_independent() -> None:
    """One node's silence says nothing about another, and the list is always in the same order."""
    driver = Driver()
    driver.register(stream=1, info=make_info("z"))
    driver.advance(10.0)
    driver.register(stream=2, info=make_info("a"))
    driver.advance(2.0)
    assert list(driver.states().items()) == [("a", READY), ("z", DOWN)]


def test_rules_follow_the_settings() -> None:
    """Missed heartbeats, the down timeout and the time until a node is dropped are settable."""
    rules = rules_from_settings(
        HealthSettings(
            report_interval_s=2.0,
            suspect_after_missed=4,
            down_after_s=20.0,
            forget_down_after_s=100.0,
        )
    )
    assert rules == HealthRules(suspect_after_s=8.0, down_after_s=20.0, forget_after_s=120.0)
    assert rules_from_settings(HealthSettings()) == HealthRules()


@pytest.mark.parametrize(
    ("field", "value"),
    [("node_id", ""), ("node_id", "x" * 257), ("epoch", ""), ("engine_url", "127.0.0.1:8100")],
)
def test_node_facts_are_checked(field: str, value: str) -> None:
    """A node without a name, an epoch or a base URL cannot be described."""
    facts = {"node_id": "n", "epoch": "e", "engine_url": "http://h:1", field: value}
    with pytest.raises(InvalidArgument, match=field):
        NodeInfo(facts["node_id"], facts["epoch"], NodeRole.DECODE, facts["engine_url"])
