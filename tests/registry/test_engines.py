"""Streams, epochs and inventories: who speaks for an engine, and what a restart leaves."""

from __future__ import annotations

import pytest

from kvtide.registry.events import EndCause, Ended, EngineReport
from kvtide.registry.ports import ConversationKey, EndReason, LeaseState, MissReason, ReadOutcome
from kvtide.registry.rules import LeaseRules
from kvtide.runtime.errors import FailedPrecondition, InvalidArgument
from tests.registry.support import EPOCH, FLOOR, KEY, NODE, TTL_S, Driver, make_grant


def test_nothing_is_offered_from_a_detached_engine() -> None:
    """While an engine has no stream its leases stay on record and are not claimed."""
    driver = Driver()
    grant = driver.held()
    driver.detach()
    assert driver.open().miss_reason == MissReason.ENGINE_DETACHED
    driver.attach(inventory=[grant])
    assert driver.open().claimed is not None


def test_detach_leaves_an_open_claim_alone() -> None:
    """A claim in flight survives the loss of the engine's stream and can still be settled."""
    driver = Driver()
    driver.held()
    result = driver.open()
    driver.detach()
    assert driver.lease().state is LeaseState.CLAIMED
    driver.settle(result, ReadOutcome.READ)
    assert driver.lease().state is LeaseState.CONSUMED


def test_a_newer_stream_replaces_the_older_one() -> None:
    """What the older stream of an engine still says is ignored, its end included."""
    driver = Driver()
    grant = driver.held()
    old = driver._streams[NODE, EPOCH]
    driver.attach(inventory=[grant])
    driver.report(EngineReport(ended=(Ended("request-1000", EndCause.READ),)), stream=old)
    driver.report(EngineReport(inventory=()), stream=old)
    driver.detach(stream=old)
    assert driver.table.counts["report_from_replaced_stream"] == 2
    assert driver.open().claimed is not None


def test_a_new_epoch_loses_all_old_leases_at_once() -> None:
    """A restarted engine holds nothing of before: held, claimed and releasing leases are lost."""
    driver = Driver()
    driver.attach()
    keys = [ConversationKey("t", f"c{number}") for number in range(3)]
    for number, key in enumerate(keys):
        driver.grant(driver.open(key).generation, f"r{number}", key=key)
    driver.open(keys[1])
    driver.close(keys[2])
    driver.attach(epoch="epoch-b")
    lost = {(lease.state, lease.end_reason) for lease in driver.ends()}
    assert lost == {(LeaseState.LOST, EndReason.ENGINE_RESTARTED)}
    assert len(driver.ends()) == 3
    assert driver.open(keys[0]).claimed is None


def test_a_stream_of_a_replaced_epoch_is_refused() -> None:
    """A leftover process of a restarted engine cannot take the node back."""
    driver = Driver()
    driver.attach()
    driver.attach(epoch="epoch-b")
    with pytest.raises(FailedPrecondition, match="epoch-b"):
        driver.attach(epoch=EPOCH)
    driver.grant(driver.open().generation, "of-b", epoch="epoch-b")
    assert driver.open().claimed is not None


def test_a_shut_out_engine_gets_back_when_the_other_one_is_gone() -> None:
    """Epochs cannot be compared, so the one that is refused is believed once it is alone."""
    driver = Driver()
    driver.attach()
    driver.attach(epoch="leftover")
    driver.detach(epoch="leftover")
    driver.attach()
    driver.grant(driver.open().generation)
    assert driver.open().claimed is not None


@pytest.mark.parametrize(("node", "epoch"), [("", "e"), ("n", ""), ("n" * 257, "e")])
def test_attach_needs_ids(node: str, epoch: str) -> None:
    """An engine without a name or an epoch is turned away."""
    with pytest.raises(InvalidArgument):
        Driver().attach(node, epoch)


# ---- inventories -------------------------------------------------------------------------------


def test_missing_from_the_inventory_means_gone() -> None:
    """Leases that an engine does not list have ended, and the others are untouched."""
    driver = Driver()
    driver.attach()
    keys = [ConversationKey("t", f"c{number}") for number in range(3)]
    grants = [
        driver.grant(driver.open(key).generation, f"r{number}", key=key)
        for number, key in enumerate(keys)
    ]
    driver.inventory(grants[1])
    assert [lease.key for lease in driver.ends()] == [keys[0], keys[2]]
    assert {lease.end_reason for lease in driver.ends()} == {EndReason.NOT_IN_INVENTORY}
    assert driver.open(keys[1]).claimed is not None


def test_an_inventory_does_not_touch_other_engines() -> None:
    """What one engine lists says nothing about another's leases."""
    driver = Driver()
    driver.held()
    driver.attach("decode-2", "epoch-2")
    driver.inventory(node="decode-2", epoch="epoch-2")
    assert driver.lease().state is LeaseState.HELD


def test_grant_end_and_inventory_in_one_message() -> None:
    """A lease granted and read since the last message is consumed, not missing."""
    driver = Driver()
    driver.attach()
    grant = make_grant(KEY, driver.open().generation, "r")
    driver.report(EngineReport(grants=(grant,), ended=(Ended("r", EndCause.READ),), inventory=()))
    assert driver.lease().state is LeaseState.CONSUMED


def test_a_release_is_repeated_until_it_is_acknowledged() -> None:
    """A release that got lost with its stream is sent again when the engine lists the lease."""
    driver = Driver()
    grant = driver.held()
    driver.detach()
    driver.close()
    driver.attach(inventory=[grant])
    driver.inventory(grant)
    assert driver.releases() == ["request-1000"] * 3
    driver.ended("request-1000", EndCause.RELEASED)
    assert driver.lease().state is LeaseState.RELEASED


def test_a_lost_acknowledgement_is_made_up_by_the_inventory() -> None:
    """A lease being released that the engine does not list any more has been released."""
    driver = Driver()
    driver.held()
    driver.close()
    driver.inventory()
    lease = driver.lease()
    assert (lease.state, lease.end_reason) == (LeaseState.RELEASED, EndReason.CLOSED)


@pytest.mark.parametrize("end", ["read", "released"])
def test_a_leaked_pin_is_found(end: str) -> None:
    """What was read or released and is still pinned is released again on the next inventory."""
    driver = Driver()
    grant = driver.held()
    if end == "read":
        driver.settle(driver.open(), ReadOutcome.READ)
    else:
        driver.close()
        driver.ended("request-1000", EndCause.RELEASED)
    already = len(driver.releases())
    driver.inventory(grant)
    assert driver.releases()[already:] == ["request-1000"]


def test_an_expired_lease_in_its_grace_period_is_left_to_the_engine() -> None:
    """Past its deadline a transfer may still run into the grace period: nothing is released."""
    driver = Driver()
    grant = driver.held()
    driver.open()
    driver.advance(TTL_S)
    driver.inventory(make_grant(KEY, grant.generation, "request-1000", time_left_s=0.0))
    assert driver.releases() == []
    assert driver.lease().state is LeaseState.EXPIRED


# ---- a registry that lost everything -----------------------------------------------------------


def restarted(rules: LeaseRules | None = None) -> Driver:
    """A new registry to which an engine reports what turns of the old one left."""
    driver = Driver(rules or LeaseRules(), now_s=50.0)
    grants = [
        make_grant(ConversationKey("t", f"c{number}"), 7, f"r{number}", now_s=50.0)
        for number in range(4)
    ]
    driver.attach(inventory=grants)
    return driver


def test_one_exchange_makes_an_empty_registry_right() -> None:
    """After one inventory every pinned lease is on record with its time left."""
    driver = restarted()
    for number in range(4):
        lease = driver.lease(ConversationKey("t", f"c{number}"))
        assert (lease.state, lease.time_left_s) == (LeaseState.HELD, TTL_S)
    assert driver.open(ConversationKey("t", "c0")).generation >= FLOOR


def test_what_an_earlier_registry_may_have_let_read_is_not_offered_too_early() -> None:
    """Restored leases wait until the claims of the registry before have run out."""
    driver = restarted()
    key = ConversationKey("t", "c0")
    assert driver.open(key).miss_reason == MissReason.IN_USE
    driver.now_s += 60.0 - 0.001
    assert driver.open(key).miss_reason == MissReason.IN_USE
    driver.now_s += 0.001
    assert driver.open(key).claimed is not None


def test_without_the_wait_restored_leases_are_offered_at_once() -> None:
    """Where turns of a conversation never overlap the wait can be set to nothing."""
    driver = restarted(LeaseRules(restored_wait_s=0.0))
    assert driver.open(ConversationKey("t", "c0")).claimed is not None


def test_turns_of_this_registry_do_not_wait() -> None:
    """A turn opened here whose grant first comes in an inventory is offered at once."""
    driver = Driver()
    driver.attach()
    turn = driver.open()
    driver.inventory(make_grant(KEY, turn.generation, "r"))
    assert driver.open().claimed is not None


def test_two_leases_of_one_conversation_in_an_inventory() -> None:
    """The newest generation is kept and the other released, in whichever order they are listed."""
    for order in ((5, 6), (6, 5)):
        driver = Driver()
        driver.attach(inventory=[make_grant(KEY, number, f"r{number}") for number in order])
        assert driver.lease().generation == 6
        driver.advance(60.0)
        assert driver.releases() == ["r5"]


def test_a_restored_lease_is_not_released_under_a_reader_of_an_earlier_registry() -> None:
    """A close or a newer grant waits, like an offer, until no earlier claim can stand."""
    driver = restarted()
    key = ConversationKey("t", "c0")
    driver.grant(driver.open(key).generation, "newer", key=key)
    driver.close(ConversationKey("t", "c1"))
    driver.advance(59.9)
    assert driver.releases() == []
    driver.advance(0.1)
    assert driver.releases() == ["r0", "r1"]
