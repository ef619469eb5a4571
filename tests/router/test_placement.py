from __future__ import annotations

import pytest

from kvtide.health import Node, NodeInfo, NodeLoad, NodeRole, NodeState
from kvtide.router.placement import (
    choose_node,
    fleet_is_ready,
    model_is_known,
    model_names,
    ready_nodes,
)

P, D = NodeRole.PREFILL, NodeRole.DECODE
READY = NodeState.READY


def node(
    node_id: str,
    role: NodeRole = P,
    state: NodeState = READY,
    models: tuple[str, ...] = ("m",),
    **load: int,
) -> Node:
    info = NodeInfo(
        node_id=node_id, epoch="e", role=role, engine_url="http://127.0.0.1:1", models=models
    )
    return Node(info=info, state=state, load=NodeLoad(**load))


def chosen(nodes, role=P, in_flight=None, **kwargs) -> str | None:
    found = choose_node(nodes, role, "m", in_flight or {}, **kwargs)
    return found.info.node_id if found else None


@pytest.mark.parametrize("state", [NodeState.STARTING, NodeState.SUSPECT, NodeState.DOWN])
def test_only_ready_nodes_take_turns(state):
    """A node in any other state gets nothing, even when it is the only one."""
    assert chosen([node("a", state=state)]) is None
    assert chosen([node("a", state=state), node("b")]) == "b"


def test_role_and_model_must_fit():
    """A node of the other role, or without the model, is not asked."""
    nodes = [node("d", role=D), node("other", models=("x",)), node("p", models=("x", "m"))]
    assert chosen(nodes) == "p"
    assert chosen(nodes, role=D) == "d"
    assert [n.info.node_id for n in ready_nodes(nodes, P, "x")] == ["other", "p"]


def test_the_least_busy_node_wins():
    """The router's own count decides, before anything that engines report."""
    nodes = [node("a", running_requests=0), node("b", running_requests=9)]
    assert chosen(nodes, in_flight={"a": 2, "b": 1}) == "b"


def test_ties_go_to_the_engines_load_then_pins_then_name():
    """With equal counts: fewest requests, then fewest pinned blocks, then the first name."""
    assert chosen([node("a", running_requests=2), node("b", waiting_requests=1)]) == "b"
    assert chosen([node("a", pinned_blocks=5), node("b", pinned_blocks=4)]) == "b"
    assert chosen([node("b"), node("a")]) == "a"


def test_the_preferred_node_wins_when_it_is_ready():
    """Affinity beats load, but not readiness, model or exclusion."""
    nodes = [node("a", role=D), node("b", role=D), node("s", role=D, state=NodeState.SUSPECT)]
    assert chosen(nodes, role=D, in_flight={"b": 50}, prefer="b") == "b"
    assert chosen(nodes, role=D, prefer="s") == "a"
    assert chosen(nodes, role=D, prefer="gone") == "a"
    assert chosen(nodes, role=D, prefer="b", exclude={"b"}) == "a"


def test_excluded_nodes_are_not_asked_again():
    """With every node excluded there is none."""
    nodes = [node("a"), node("b")]
    assert chosen(nodes, exclude={"a"}) == "b"
    assert chosen(nodes, exclude={"a", "b"}) is None


def test_models_are_those_of_all_nodes():
    """The list has each model once, sorted, whatever the nodes' states."""
    nodes = [node("a", models=("z", "m")), node("b", state=NodeState.DOWN, models=("m", "b"))]
    assert model_names(nodes) == ["b", "m", "z"]


def test_an_unknown_model_is_known_to_be_unknown_only_with_a_fleet():
    """Of an empty fleet nothing is known, so no model is said not to exist."""
    assert not model_is_known([node("a")], "x")
    assert model_is_known([node("a", state=NodeState.DOWN)], "m")
    assert model_is_known([], "x")


def test_a_fleet_is_ready_when_one_model_has_both_roles():
    """A prefill node for one model and a decode node for another serve nobody."""
    assert fleet_is_ready([node("p"), node("d", role=D)])
    assert not fleet_is_ready([node("p"), node("d", role=D, models=("x",))])
    assert not fleet_is_ready([node("p")])
    assert not fleet_is_ready([])
