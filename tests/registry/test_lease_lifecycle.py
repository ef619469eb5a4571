"""One lease from grant to end: every transition, and who may cause it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtide.connector.pins import PIN_GRACE_S
from kvtide.registry.events import EndCause
from kvtide.registry.ports import EndReason, LeaseState, MissReason, ReadOutcome
from tests.registry.support import EPOCH, KEY, NODE, TTL_S, Driver, make_grant

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide.registry.ports import ClaimResult


def claimed_lease() -> tuple[Driver, ClaimResult]:
    driver = Driver()
    driver.held()
    result = driver.open()
    assert result.claimed is not None
    return driver, result


def in_state(state: LeaseState) -> Driver:
    """A driver whose conversation KEY has a lease, request id "request-1000", in `state`."""
    driver = Driver()
    driver.held()
    if state is LeaseState.CLAIMED:
        driver.open()
    elif state is LeaseState.RELEASING:
        driver.close()
    elif state is LeaseState.CONSUMED:
        driver.settle(driver.open(), ReadOutcome.READ)
    elif state is LeaseState.RELEASED:
        driver.close()
        driver.ended("request-1000", EndCause.RELEASED)
    elif state is LeaseState.EXPIRED:
        driver.advance(TTL_S)
    elif state is LeaseState.LOST:
        driver.inventory()
    assert driver.lease().state is state
    return driver


def still_granted(driver: Driver) -> None:
    driver.inventory(make_grant(KEY, 1000, "request-1000"))


EVENTS: dict[str, Callable[[Driver], object]] = {
    "claim": lambda driver: driver.open(),
    "close": lambda driver: driver.close(),
    "superseded": lambda driver: driver.grant(2000),
    "reported again": still_granted,
    "missing from inventory": lambda driver: driver.inventory(),
    "read": lambda driver: driver.ended("request-1000", EndCause.READ),
    "expired by engine": lambda driver: driver.ended("request-1000", EndCause.EXPIRED),
    "released by engine": lambda driver: driver.ended("request-1000", EndCause.RELEASED),
    "cause unknown": lambda driver: driver.ended("request-1000", EndCause.UNKNOWN),
    "detached": lambda driver: driver.detach(),
    "new stream": lambda driver: driver.attach(inventory=[make_grant(KEY, 1000, "request-1000")]),
    "new epoch": lambda driver: driver.attach(epoch="epoch-b"),
    "claim limit": lambda driver: driver.advance(60.0),
    "deadline": lambda driver: driver.advance(TTL_S),
}

H, C, R = LeaseState.HELD, LeaseState.CLAIMED, LeaseState.RELEASING
CONSUMED, RELEASED = LeaseState.CONSUMED, LeaseState.RELEASED
EXPIRED, LOST = LeaseState.EXPIRED, LeaseState.LOST

TRANSITIONS = {
    # event: (from HELD, from CLAIMED, from RELEASING)
    "claim": (C, C, R),
    "close": (R, C, R),
    "superseded": (R, C, R),
    "reported again": (H, C, R),
    "missing from inventory": (LOST, LOST, RELEASED),
    "read": (CONSUMED, CONSUMED, CONSUMED),
    "expired by engine": (EXPIRED, EXPIRED, EXPIRED),
    "released by engine": (RELEASED, RELEASED, RELEASED),
    "cause unknown": (LOST, LOST, LOST),
    "detached": (H, C, R),
    "new stream": (H, C, R),
    "new epoch": (LOST, LOST, LOST),
    "claim limit": (H, H, R),
    "deadline": (EXPIRED, EXPIRED, EXPIRED),
}


def state_of(driver: Driver, request: str) -> LeaseState:
    lease = driver.table._book.find(NODE, EPOCH, request)
    assert lease is not None
    return lease.state


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize(("column", "start"), list(enumerate((H, C, R))))
def test_transition_table(event: str, column: int, start: LeaseState) -> None:
    """Each event takes a live lease to exactly the state that the table of transitions says."""
    driver = in_state(start)
    EVENTS[event](driver)
    assert state_of(driver, "request-1000") is TRANSITIONS[event][column]


@pytest.mark.parametrize("event", sorted(set(EVENTS) - {"deadline"}))
@pytest.mark.parametrize("final", [CONSUMED, RELEASED, EXPIRED, LOST])
def test_ended_is_final(event: str, final: LeaseState) -> None:
    """No event, in whatever order, brings an ended lease back while it is on record."""
    driver = in_state(final)
    ended_before = len(driver.ends())
    if event == "claim limit":
        driver.advance(30.0)
    else:
        EVENTS[event](driver)
    assert state_of(driver, "request-1000") is final
    again = [lease for lease in driver.ends()[ended_before:] if lease.generation == 1000]
    assert again == []
    assert driver.open().claimed is None or event == "superseded"


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (ReadOutcome.READ, CONSUMED),
        (ReadOutcome.NOT_READ, H),
        (ReadOutcome.UNKNOWN, C),
        (ReadOutcome.UNSPECIFIED, C),
    ],
)
def test_settle_moves_a_claim(outcome: ReadOutcome, state: LeaseState) -> None:
    """A settled claim ends as read, goes back as not read, and stands when nobody can tell."""
    driver, result = claimed_lease()
    driver.settle(result, outcome)
    driver.settle(result, outcome)
    assert driver.lease().state is state


def test_what_a_claim_hands_out() -> None:
    """A claim carries the handle, the fingerprint and the granted retention unchanged."""
    driver = Driver()
    grant = driver.held()
    claimed = driver.open().claimed
    assert claimed is not None
    assert claimed.node_id == NODE
    assert claimed.generation == grant.generation
    assert claimed.fingerprint == grant.fingerprint
    assert claimed.handle.block_groups == grant.handle.block_groups
    assert claimed.ttl_s == TTL_S
    assert claimed.claim_time_left_s == 60.0


@pytest.mark.parametrize(
    ("time_left_s", "claim_left_s"), [(480.0, 60.0), (60.0, 60.0), (59.0, 59.0), (10.0, 10.0)]
)
def test_reader_gets_the_claims_deadline_in_the_engines_clock(
    time_left_s: float, claim_left_s: float
) -> None:
    """The handed-out expiry is the claim's deadline, however far the engine's clock is away."""
    driver = Driver()
    grant = driver.held(time_left_s=time_left_s)
    expiry_s = grant.handle.engine_clock_expiry_s
    claimed = driver.open().claimed
    assert claimed is not None
    assert expiry_s is not None
    assert claimed.claim_time_left_s == pytest.approx(claim_left_s)
    assert claimed.handle.engine_clock_expiry_s == pytest.approx(
        expiry_s - PIN_GRACE_S - (time_left_s - claim_left_s)
    )


def test_a_claim_is_exclusive() -> None:
    """While one turn holds a claim the next turn gets none, and is told why."""
    driver, _ = claimed_lease()
    second = driver.open()
    assert (second.claimed, second.miss_reason) == (None, MissReason.IN_USE)


@pytest.mark.parametrize("pend", ["close", "superseded"])
@pytest.mark.parametrize("end", ["not read", "claim limit"])
def test_a_claimed_lease_is_never_released(pend: str, end: str) -> None:
    """A release that comes during a claim is sent only when the claim has ended."""
    driver, result = claimed_lease()
    EVENTS[pend](driver)
    driver.settle(result, ReadOutcome.UNKNOWN)
    assert driver.releases() == []
    if end == "not read":
        driver.settle(result, ReadOutcome.NOT_READ)
    else:
        driver.advance(60.0)
    assert driver.releases() == ["request-1000"]
    assert state_of(driver, "request-1000") is LeaseState.RELEASING


def test_a_read_under_a_claim_that_was_to_be_released_sends_no_release() -> None:
    """A claim that ends with a read needs no release: the engine freed the blocks itself."""
    driver, result = claimed_lease()
    driver.close()
    driver.settle(result, ReadOutcome.READ)
    assert driver.releases() == []
    assert driver.lease().state is CONSUMED


def test_time_passes_before_the_event() -> None:
    """At its deadline a lease is over: the settle, report and claim of that moment find it so."""
    driver, result = claimed_lease()
    driver.now_s += TTL_S
    driver.settle(result, ReadOutcome.NOT_READ)
    assert driver.lease().state is EXPIRED

    driver = Driver()
    grant = driver.held()
    driver.now_s += TTL_S
    driver.inventory(grant)
    assert driver.lease().state is EXPIRED

    driver = Driver()
    driver.held()
    driver.now_s += TTL_S
    assert driver.open().miss_reason == MissReason.NO_LEASE


def test_claim_and_lease_that_end_together_end_as_expired() -> None:
    """A claim cut to its lease's deadline never gives back a lease that is over."""
    driver = Driver()
    driver.held(time_left_s=30.0)
    assert driver.open().claimed is not None
    driver.advance(30.0)
    assert [lease.state for lease in driver.ends()] == [EXPIRED]


def test_a_claim_that_ran_out_can_be_claimed_again() -> None:
    """After a claim's deadline its lease is free for the next turn, if time is left."""
    driver, first = claimed_lease()
    driver.settle(first, ReadOutcome.UNKNOWN)
    driver.now_s += 60.0
    second = driver.open().claimed
    assert first.claimed is not None
    assert second is not None
    assert second.claim_id != first.claimed.claim_id


def test_late_word_of_a_read_consumes_the_lease_whoever_holds_it() -> None:
    """A read under a claim that has run out still means that the engine freed the blocks."""
    driver, first = claimed_lease()
    driver.now_s += 60.0
    second = driver.open()
    assert second.claimed is not None
    driver.settle(first, ReadOutcome.READ)
    assert driver.lease().state is CONSUMED


def test_late_word_of_no_read_does_not_touch_the_next_claim() -> None:
    """A claim that has run out cannot give back what another turn holds now."""
    driver, first = claimed_lease()
    driver.now_s += 60.0
    assert driver.open().claimed is not None
    driver.settle(first, ReadOutcome.NOT_READ)
    assert driver.lease().state is C


def test_least_time_left_for_a_claim() -> None:
    """A lease is offered with exactly the least time left, and not with less."""
    driver = Driver()
    driver.held()
    driver.now_s += TTL_S - 10.0 + 0.001
    assert driver.open().miss_reason == MissReason.TOO_LITTLE_TIME
    driver.now_s -= 0.001
    assert driver.open().claimed is not None


@pytest.mark.parametrize(
    ("cause", "state", "reason"),
    [
        (EndCause.READ, CONSUMED, EndReason.CONSUMED),
        (EndCause.EXPIRED, EXPIRED, EndReason.EXPIRED),
        (EndCause.RELEASED, RELEASED, None),
        (EndCause.UNKNOWN, LOST, None),
    ],
)
def test_why_a_lease_ended(cause: EndCause, state: LeaseState, reason: EndReason | None) -> None:
    """The engine's word on how a lease ended is what the record says."""
    driver = Driver()
    driver.held()
    driver.ended("request-1000", cause)
    lease = driver.lease()
    assert (lease.state, lease.end_reason, lease.time_left_s) == (state, reason, 0.0)


def test_a_released_lease_keeps_why_it_was_released() -> None:
    """The reason of a release survives until the engine acknowledged it."""
    driver = Driver()
    driver.held()
    driver.close()
    assert driver.lease().end_reason is EndReason.CLOSED
    driver.ended("request-1000", EndCause.RELEASED)
    assert driver.lease().end_reason is EndReason.CLOSED


def test_duplicate_and_unknown_ends_are_counted_and_nothing_else() -> None:
    """An end that comes twice, or of a lease that nobody knows, changes nothing."""
    driver = Driver()
    driver.held()
    driver.ended("request-1000", EndCause.READ)
    effects_before = len(driver.effects)
    driver.ended("request-1000", EndCause.RELEASED)
    driver.ended("never-granted", EndCause.READ)
    assert len(driver.effects) == effects_before
    assert driver.table.counts == {"ended_again": 1, "ended_unknown_lease": 1}
