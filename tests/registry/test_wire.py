"""Lease messages survive the trip to protobuf and back."""

from __future__ import annotations

import pytest

from kvtide.registry import wire
from kvtide.registry.events import EndCause, EngineReport, Grant
from kvtide.registry.ports import (
    ClaimedLease,
    ClaimResult,
    EndReason,
    LeasePage,
    LeaseQuery,
    LeaseState,
    LeaseView,
    ReadOutcome,
    Settlement,
)
from kvtide.runtime.errors import Internal, InvalidArgument
from kvtide.v1 import lease_pb2 as pb
from tests.registry.support import FINGERPRINT, KEY, make_grant

VIEW = LeaseView(KEY, 7, "n", "e", LeaseState.HELD, None, 40, 3, 12.5)


@pytest.mark.parametrize(
    ("ours", "theirs", "unspecified"),
    [
        (LeaseState, pb.LeaseState, 1),
        (EndReason, pb.LeaseEndReason, 1),
        (ReadOutcome, pb.ReadOutcome, 0),
        (EndCause, pb.LeaseEndCause, 0),
    ],
)
def test_enums_have_the_same_members(ours: type, theirs: object, unspecified: int) -> None:
    """Every value of the contract has its counterpart, so that none gets lost in translation."""
    assert len(theirs.values()) == len(ours) + unspecified  # type: ignore[attr-defined,arg-type]


@pytest.mark.parametrize("state", LeaseState)
def test_lease_round_trip(state: LeaseState) -> None:
    """A view of a lease in any state comes back as it was."""
    for reason in (None, *EndReason):
        view = LeaseView(KEY, 7, "n", "e", state, reason, 40, 3, 12.5)
        assert wire.lease_from_proto(wire.lease_to_proto(view)) == view


def test_claim_result_round_trip() -> None:
    """A claim, and the absence of one, come back as they were."""
    handle = make_grant(KEY, 7, "r").handle
    claimed = ClaimedLease("claim", "n", handle, FINGERPRINT, 7, 59.999, 480.0)
    for result in (ClaimResult(8, claimed), ClaimResult(8, None, "in_use")):
        assert wire.claim_result_from_proto(wire.claim_result_to_proto(result)) == result


@pytest.mark.parametrize("outcome", ReadOutcome)
def test_settlement_round_trip(outcome: ReadOutcome) -> None:
    """A settlement with any outcome comes back as it was."""
    for expected in (True, False):
        settlement = Settlement(KEY, 8, "claim", outcome, expected)
        assert wire.settlement_from_proto(wire.settlement_to_proto(settlement)) == settlement


def test_query_and_page_round_trip() -> None:
    """A query and its page come back as they were."""
    for state in (None, *LeaseState):
        query = LeaseQuery("n", "t", state, 5, "token")
        assert wire.query_from_proto(wire.query_to_proto(query)) == query
    page = LeasePage((VIEW, VIEW), "token")
    assert wire.page_from_proto(wire.page_to_proto(page)) == page


def test_report_round_trip() -> None:
    """Grants, ends and an inventory of one message come out in their places."""
    grant = make_grant(KEY, 7, "r")
    request = pb.AttachRequest(
        grants=[wire.grant_to_proto(grant)],
        ended=[
            pb.LeaseEnded(request_id=str(cause), cause=cause)  # type: ignore[arg-type]
            for cause in (*pb.LeaseEndCause.values(), 99)
        ],
        inventory=pb.EngineInventory(held=[wire.grant_to_proto(grant)]),
    )
    report = wire.report_from_proto(request)
    assert report.grants == report.inventory == (grant,)
    assert [ended.cause for ended in report.ended] == [
        EndCause.UNKNOWN,
        EndCause.READ,
        EndCause.EXPIRED,
        EndCause.RELEASED,
        EndCause.UNKNOWN,
    ]


def test_no_inventory_is_not_an_empty_inventory() -> None:
    """Saying nothing about what is held is different from holding nothing."""
    assert wire.report_from_proto(pb.AttachRequest()) == EngineReport()
    empty = pb.AttachRequest(inventory=pb.EngineInventory())
    assert wire.report_from_proto(empty).inventory == ()


@pytest.mark.parametrize(
    ("seconds", "milliseconds"),
    [(0.0, 0), (-1.0, 0), (59.9999, 59_999), (480.0, 480_000), (1e9, 2**32 - 1)],
)
def test_time_left_is_rounded_down_and_bounded(seconds: float, milliseconds: int) -> None:
    """No duration comes out longer than it is, negative, or too large for the wire."""
    assert wire.ms_left(seconds) == milliseconds


def test_malformed_entries_are_refused_one_by_one() -> None:
    """What cannot be read is named with its request id, wherever in the message it stands."""
    good = wire.grant_to_proto(make_grant(KEY, 7, "good"))
    bad = wire.grant_to_proto(make_grant(KEY, 7, "bad"))
    bad.handle.block_size_tokens = 0
    worse = pb.LeaseGrant()
    report = wire.report_from_proto(
        pb.AttachRequest(grants=[bad, good], inventory=pb.EngineInventory(held=[worse, good, bad]))
    )
    assert [entry.request_id for entry in report.refused] == ["bad", "", "bad"]
    assert all(isinstance(grant, Grant) for grant in report.grants)
    assert report.inventory is not None
    assert len(report.inventory) == 1


def test_values_of_a_newer_version() -> None:
    """An outcome that is not known counts as unknown; a state that is not known is an error."""
    settle = wire.settlement_to_proto(Settlement(KEY, 8, "claim"))
    settle.read_outcome = 99  # type: ignore[assignment]
    assert wire.settlement_from_proto(settle).read_outcome is ReadOutcome.UNKNOWN
    with pytest.raises(InvalidArgument, match="99"):
        wire.query_from_proto(pb.ListLeasesRequest(state=99))  # type: ignore[arg-type]
    lease = wire.lease_to_proto(VIEW)
    lease.state = 99  # type: ignore[assignment]
    with pytest.raises(Internal, match="99"):
        wire.lease_from_proto(lease)


def test_a_malformed_claim_is_the_servers_fault() -> None:
    """A claim without a usable handle raises an error that says what is missing."""
    response = pb.ClaimResponse(generation=1, claimed=pb.ClaimedLease(claim_id="c"))
    with pytest.raises(Internal, match="engine_id"):
        wire.claim_result_from_proto(response)
