"""Turns, grants and the end of a conversation: what fences what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtide.connector.pins import PIN_GRACE_S
from kvtide.registry.events import EngineReport, GrantRefused, GrantWaitOver, RefusedGrant
from kvtide.registry.ports import (
    ConversationKey,
    EndReason,
    LeaseState,
    MissReason,
    ReadOutcome,
    Settlement,
)
from kvtide.runtime.errors import InvalidArgument, NotFound
from tests.registry.support import FLOOR, KEY, NODE, Driver, make_grant

OTHER = ConversationKey("tenant-b", KEY.conversation_id)


def waits_over(driver: Driver) -> int:
    return sum(isinstance(effect, GrantWaitOver) for effect in driver.effects)


def test_generations_grow_and_start_at_the_floor() -> None:
    """Every turn of a conversation has a greater generation than all before it."""
    driver = Driver()
    assert [driver.open().generation for _ in range(3)] == [FLOOR, FLOOR + 1, FLOOR + 2]


def test_generations_grow_past_what_engines_report() -> None:
    """A turn that only an engine remembers is never opened a second time."""
    driver = Driver()
    driver.attach()
    driver.grant(FLOOR + 50)
    assert driver.open().generation == FLOOR + 51


def test_a_forgotten_conversation_gets_no_generation_twice() -> None:
    """Forgetting an idle conversation does not forget which generations it used."""
    driver = Driver()
    generations = [driver.open().generation for _ in range(5)]
    driver.advance(3600.0)
    assert driver.table._conversations == {}
    assert driver.open().generation > max(generations)


def test_tenants_do_not_share_conversations() -> None:
    """The same conversation id of two tenants names two conversations."""
    driver = Driver()
    driver.held()
    assert driver.open(OTHER).miss_reason == MissReason.NO_LEASE
    assert driver.open(KEY).claimed is not None


@pytest.mark.parametrize("field", ["tenant", "conversation_id"])
@pytest.mark.parametrize("value", ["", "x" * 257])
def test_ids_have_1_to_256_characters(field: str, value: str) -> None:
    """A conversation key with an empty or overlong part cannot be made."""
    parts = {"tenant": "t", "conversation_id": "c", field: value}
    with pytest.raises(InvalidArgument, match=field):
        ConversationKey(**parts)


def test_a_grant_that_arrives_twice_is_one_grant() -> None:
    """The same request granted again, alone or in an inventory, adds nothing."""
    driver = Driver()
    grant = driver.held()
    driver.report(EngineReport(grants=(grant, grant), inventory=(grant,)))
    assert len(driver.table._book.by_serial) == 1
    assert driver.releases() == []


@pytest.mark.parametrize(
    ("delay_s", "left_s"),
    [(-1.0, 479.0), (0.0, 480.0), (20.0, 480.0)],
    ids=["arrived faster", "as fast", "arrived 20 s late"],
)
def test_repeated_report_never_lengthens_what_was_not_renewed(
    delay_s: float, left_s: float
) -> None:
    """Of two estimates of one engine deadline the earlier stands: a slow message adds no time."""
    driver = Driver()
    grant = driver.held()
    driver.inventory(replace(grant, time_left_s=480.0 + delay_s))
    assert driver.lease().time_left_s == pytest.approx(left_s)


def test_a_renewed_deadline_lengthens_and_replaces_the_stored_expiry() -> None:
    """A later engine deadline moves the lease's deadline and the expiry that readers get."""
    driver = Driver()
    grant = driver.held(time_left_s=30.0)
    driver.now_s += 20.0
    renewed = make_grant(
        KEY, grant.generation, "request-1000", now_s=driver.now_s, time_left_s=30.0
    )
    driver.inventory(renewed)
    assert driver.lease().time_left_s == pytest.approx(30.0)
    driver.inventory(grant)  # Overtaken: an older deadline shortens nothing.
    claimed = driver.open().claimed
    assert claimed is not None
    assert renewed.handle.engine_clock_expiry_s is not None
    assert claimed.handle.engine_clock_expiry_s == (
        renewed.handle.engine_clock_expiry_s - PIN_GRACE_S
    )


def test_a_newer_grant_supersedes_a_held_lease() -> None:
    """When a turn leaves a lease, the one before is released, and only the new one is offered."""
    driver = Driver()
    driver.held()
    turn = driver.open()
    driver.settle(turn, ReadOutcome.NOT_READ)
    driver.grant(turn.generation, "newer")
    assert driver.releases() == ["request-1000"]
    claimed = driver.open().claimed
    assert claimed is not None
    assert claimed.handle.request_id == "newer"


def test_an_older_grant_is_released_at_once() -> None:
    """A turn that finishes after a later one leaves nothing pinned and replaces nothing."""
    driver = Driver()
    driver.attach()
    first, second = driver.open(), driver.open()
    driver.grant(second.generation, "of-second")
    driver.grant(first.generation, "of-first")
    assert driver.releases() == ["of-first"]
    assert driver.lease().generation == second.generation


def test_an_older_grant_is_released_even_after_the_newer_lease_is_off_record() -> None:
    """That a later turn left a lease is remembered longer than the lease."""
    driver = Driver()
    driver.attach()
    first, second = driver.open(), driver.open()
    driver.grant(second.generation, "of-second")
    driver.settle(driver.open(), ReadOutcome.READ)
    driver.advance(120.0)
    with pytest.raises(NotFound):
        driver.lease()
    driver.grant(first.generation, "of-first")
    assert driver.releases() == ["of-first"]


def test_a_turn_granted_by_two_engines_keeps_the_latest() -> None:
    """When a decode leg was retried elsewhere, the last grant stands and the other is released."""
    driver = Driver()
    driver.attach()
    driver.attach("decode-2", "epoch-2")
    turn = driver.open()
    driver.grant(turn.generation, "first-try")
    driver.grant(turn.generation, "second-try", node="decode-2", epoch="epoch-2")
    assert driver.releases() == ["first-try"]
    assert driver.lease().node_id == "decode-2"


def test_close_releases_and_fences() -> None:
    """Closing releases the lease, and on arrival the grants of turns that were still running."""
    driver = Driver()
    driver.held()
    running = driver.open()
    driver.settle(running, ReadOutcome.NOT_READ)
    driver.close()
    driver.close()
    assert driver.releases() == ["request-1000"]
    driver.grant(running.generation, "late")
    assert driver.releases() == ["request-1000", "late"]
    views = driver.table._book.by_serial.values()
    assert {lease.end_reason for lease in views} == {EndReason.CLOSED}


def test_a_conversation_can_be_opened_again_after_close() -> None:
    """Turns opened after a close are not fenced by it."""
    driver = Driver()
    driver.held()
    driver.close()
    turn = driver.open()
    driver.grant(turn.generation, "anew")
    assert driver.open().claimed is not None


def test_closing_an_unknown_conversation_fences_what_an_earlier_registry_opened() -> None:
    """After a restart a close still releases the leases that engines report later."""
    driver = Driver()
    driver.close()
    driver.attach(inventory=[make_grant(KEY, FLOOR - 5, "from-before")])
    driver.advance(60.0)
    assert driver.releases() == ["from-before"]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"expiry_s": None}, "engine_clock_expiry_s"),
        ({"epoch": "epoch-z"}, "epoch"),
        ({"generation": 0}, "generation"),
        ({"generation": 2**62 + 1}, "generation"),
    ],
)
def test_what_cannot_be_a_lease_is_refused_and_released(wrong: dict[str, object], why: str) -> None:
    """A grant without a checkable expiry, of another epoch or an impossible turn is freed."""
    driver = Driver()
    driver.attach()
    arguments = {"generation": FLOOR, "request_id": "bad", **wrong}
    driver.report(EngineReport(grants=(make_grant(KEY, **arguments),)))  # type: ignore[arg-type]
    refused = [effect for effect in driver.effects if isinstance(effect, GrantRefused)]
    assert why in refused[0].why
    assert driver.releases() == ["bad"]
    assert driver.table.counts["grant_refused"] == 1
    assert driver.open().miss_reason == MissReason.NO_LEASE


def test_malformed_report_of_a_known_lease_does_not_release_it() -> None:
    """An unreadable inventory entry neither ends nor releases the lease, claimed or not."""
    driver = Driver()
    driver.held()
    driver.open()
    driver.report(
        EngineReport(inventory=(), refused=(RefusedGrant("request-1000", "digests missing"),))
    )
    assert driver.releases() == []
    assert driver.lease().state is LeaseState.CLAIMED


def test_a_request_id_reused_for_another_turn_changes_nothing() -> None:
    """A grant that contradicts the record is ignored and counted."""
    driver = Driver()
    driver.held()
    driver.grant(FLOOR + 7, "request-1000")
    driver.grant(FLOOR, "request-1000", key=OTHER)
    assert driver.table.counts["grant_contradicts_record"] == 2
    assert driver.lease().generation == FLOOR


# ---- waiting for a grant that is on its way ----------------------------------------------------


def test_settle_before_grant_opens_a_window() -> None:
    """A turn settled as completed makes its grant expected until the grant arrives."""
    driver = Driver()
    driver.attach()
    turn = driver.open()
    assert driver.table.grant_wait_left_s(KEY, driver.now_s) == 0
    driver.settle(turn, grant_expected=True)
    assert driver.table.grant_wait_left_s(KEY, driver.now_s) == 0.5
    driver.grant(turn.generation)
    assert driver.table.grant_wait_left_s(KEY, driver.now_s) == 0
    assert waits_over(driver) == 1


def test_the_window_closes_by_time() -> None:
    """A grant that does not come stops being expected; repeating the settle does not help."""
    driver = Driver()
    turn = driver.open()
    driver.settle(turn, grant_expected=True)
    driver.now_s += 0.2
    driver.settle(turn, grant_expected=True)
    assert driver.table.grant_wait_left_s(KEY, driver.now_s) == pytest.approx(0.3)
    driver.now_s += 0.3
    assert driver.table.grant_wait_left_s(KEY, driver.now_s) == 0


def test_settle_after_grant_expects_nothing() -> None:
    """When the grant came first there is nothing to wait for."""
    driver = Driver()
    driver.attach()
    turn = driver.open()
    driver.grant(turn.generation)
    driver.settle(turn, grant_expected=True)
    assert driver.table.grant_wait_left_s(KEY, driver.now_s) == 0


def test_an_older_grant_does_not_end_the_wait_for_a_newer() -> None:
    """Only the awaited grant, or a later one, ends the wait."""
    driver = Driver()
    driver.attach()
    first, second = driver.open(), driver.open()
    driver.settle(second, grant_expected=True)
    driver.grant(first.generation)
    assert waits_over(driver) == 0
    driver.grant(second.generation)
    assert waits_over(driver) == 1


def test_close_and_refusal_end_the_wait() -> None:
    """Nobody waits for the grant of a closed conversation, nor for one that was refused."""
    driver = Driver()
    driver.attach()
    driver.settle(driver.open(), grant_expected=True)
    driver.close()
    assert waits_over(driver) == 1
    turn = driver.open()
    driver.settle(turn, grant_expected=True)
    bad = make_grant(KEY, turn.generation, "bad", expiry_s=None)
    driver.report(EngineReport(grants=(bad,)))
    assert waits_over(driver) == 2


def test_settle_of_a_turn_that_an_earlier_registry_opened_is_waited_for() -> None:
    """A restart between a turn's claim and its settle does not lose the wait for its grant."""
    driver = Driver()
    driver.attach()
    driver._note(driver.table.settle(Settlement(KEY, FLOOR - 1, grant_expected=True), driver.now_s))
    assert driver.table.grant_wait_left_s(KEY, driver.now_s) > 0
    driver.grant(FLOOR - 1)
    claimed = driver.open()
    assert claimed.claimed is not None
    assert claimed.generation == FLOOR


@pytest.mark.parametrize("generation", [0, -1, 2**62 + 1])
def test_settle_rejects_impossible_generations(generation: int) -> None:
    """A settle names a turn; a number that can be none is the caller's error."""
    with pytest.raises(InvalidArgument, match="generation"):
        Driver().table.settle(Settlement(KEY, generation), 0.0)


def test_settle_of_another_conversations_claim_is_ignored() -> None:
    """A claim id works only together with the conversation that it was given to."""
    driver = Driver()
    driver.held()
    result = driver.open()
    driver.settle(result, ReadOutcome.READ, key=OTHER)
    assert driver.lease().state is LeaseState.CLAIMED
    assert driver.lease().node_id == NODE
