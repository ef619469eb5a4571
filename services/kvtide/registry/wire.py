"""Lease messages as protobuf, and back. No decisions.

Durations become whole milliseconds. Time left is rounded down, so that nothing is
advertised for longer than it lasts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvtide.connector.wire import (
    fingerprint_from_proto,
    fingerprint_to_proto,
    handle_from_proto,
    handle_to_proto,
)
from kvtide.registry.events import EndCause, Ended, EngineReport, Grant, RefusedGrant
from kvtide.registry.ports import (
    ClaimedLease,
    ClaimResult,
    ConversationKey,
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

if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_UINT32 = 2**32 - 1

_STATES: dict[LeaseState, pb.LeaseState] = {
    LeaseState.HELD: pb.LEASE_STATE_HELD,
    LeaseState.CLAIMED: pb.LEASE_STATE_CLAIMED,
    LeaseState.RELEASING: pb.LEASE_STATE_RELEASING,
    LeaseState.CONSUMED: pb.LEASE_STATE_CONSUMED,
    LeaseState.RELEASED: pb.LEASE_STATE_RELEASED,
    LeaseState.EXPIRED: pb.LEASE_STATE_EXPIRED,
    LeaseState.LOST: pb.LEASE_STATE_LOST,
}
_END_REASONS: dict[EndReason, pb.LeaseEndReason] = {
    EndReason.CONSUMED: pb.LEASE_END_REASON_CONSUMED,
    EndReason.EXPIRED: pb.LEASE_END_REASON_EXPIRED,
    EndReason.SUPERSEDED: pb.LEASE_END_REASON_SUPERSEDED,
    EndReason.CLOSED: pb.LEASE_END_REASON_CLOSED,
    EndReason.ENGINE_RESTARTED: pb.LEASE_END_REASON_ENGINE_RESTARTED,
    EndReason.NOT_IN_INVENTORY: pb.LEASE_END_REASON_NOT_IN_INVENTORY,
}
_READ_OUTCOMES: dict[ReadOutcome, pb.ReadOutcome] = {
    ReadOutcome.UNSPECIFIED: pb.READ_OUTCOME_UNSPECIFIED,
    ReadOutcome.READ: pb.READ_OUTCOME_READ,
    ReadOutcome.NOT_READ: pb.READ_OUTCOME_NOT_READ,
    ReadOutcome.UNKNOWN: pb.READ_OUTCOME_UNKNOWN,
}
_STATES_BACK = {number: state for state, number in _STATES.items()}
_END_REASONS_BACK = {number: reason for reason, number in _END_REASONS.items()}
_READ_OUTCOMES_BACK = {number: outcome for outcome, number in _READ_OUTCOMES.items()}
_END_CAUSES_BACK = {
    pb.LEASE_END_CAUSE_READ: EndCause.READ,
    pb.LEASE_END_CAUSE_EXPIRED: EndCause.EXPIRED,
    pb.LEASE_END_CAUSE_RELEASED: EndCause.RELEASED,
}


def ms_left(duration_s: float) -> int:
    """A time left, in milliseconds, rounded down and cut to what the wire holds."""
    return min(_MAX_UINT32, max(0, math.floor(duration_s * 1000)))


def ms_nearest(duration_s: float) -> int:
    """A duration for reports, in milliseconds, rounded to the nearest."""
    return min(_MAX_UINT32, max(0, round(duration_s * 1000)))


# ---- conversations and turns -----------------------------------------------------------------


def key_to_proto(key: ConversationKey) -> pb.ConversationKey:
    """Convert to the wire form."""
    return pb.ConversationKey(tenant=key.tenant, conversation_id=key.conversation_id)


def key_from_proto(message: pb.ConversationKey) -> ConversationKey:
    """Convert from the wire form. Raises ``InvalidArgument``."""
    return ConversationKey(message.tenant, message.conversation_id)


def claim_result_to_proto(result: ClaimResult) -> pb.ClaimResponse:
    """Convert to the wire form."""
    response = pb.ClaimResponse(generation=result.generation, miss_reason=result.miss_reason)
    claimed = result.claimed
    if claimed is not None:
        response.claimed.CopyFrom(
            pb.ClaimedLease(
                claim_id=claimed.claim_id,
                node_id=claimed.node_id,
                handle=handle_to_proto(claimed.handle),
                fingerprint=fingerprint_to_proto(claimed.fingerprint),
                generation=claimed.generation,
                claim_time_left_ms=ms_left(claimed.claim_time_left_s),
                ttl_ms=ms_nearest(claimed.ttl_s),
            )
        )
    return response


def claim_result_from_proto(response: pb.ClaimResponse) -> ClaimResult:
    """Convert from the wire form. Raises ``Internal`` when the server sent nonsense."""
    if not response.HasField("claimed"):
        return ClaimResult(response.generation, None, response.miss_reason)
    claimed = response.claimed
    try:
        handle = handle_from_proto(claimed.handle)
        fingerprint = fingerprint_from_proto(claimed.fingerprint)
    except ValueError as error:
        raise Internal("malformed_claim", f"the registry sent nonsense: {error}") from error
    return ClaimResult(
        response.generation,
        ClaimedLease(
            claim_id=claimed.claim_id,
            node_id=claimed.node_id,
            handle=handle,
            fingerprint=fingerprint,
            generation=claimed.generation,
            claim_time_left_s=claimed.claim_time_left_ms / 1000,
            ttl_s=claimed.ttl_ms / 1000,
        ),
    )


def settlement_to_proto(settlement: Settlement) -> pb.SettleRequest:
    """Convert to the wire form."""
    return pb.SettleRequest(
        conversation=key_to_proto(settlement.key),
        generation=settlement.generation,
        claim_id=settlement.claim_id,
        read_outcome=_READ_OUTCOMES[settlement.read_outcome],
        grant_expected=settlement.grant_expected,
    )


def settlement_from_proto(request: pb.SettleRequest) -> Settlement:
    """Convert from the wire form; an outcome of a newer version counts as unknown.

    Raises ``InvalidArgument``.
    """
    return Settlement(
        key=key_from_proto(request.conversation),
        generation=request.generation,
        claim_id=request.claim_id,
        read_outcome=_READ_OUTCOMES_BACK.get(request.read_outcome, ReadOutcome.UNKNOWN),
        grant_expected=request.grant_expected,
    )


# ---- views -----------------------------------------------------------------------------------


def lease_to_proto(lease: LeaseView) -> pb.Lease:
    """Convert to the wire form."""
    return pb.Lease(
        conversation=key_to_proto(lease.key),
        generation=lease.generation,
        node_id=lease.node_id,
        epoch=lease.epoch,
        state=_STATES[lease.state],
        end_reason=(
            pb.LEASE_END_REASON_UNSPECIFIED
            if lease.end_reason is None
            else _END_REASONS[lease.end_reason]
        ),
        token_count=lease.token_count,
        block_count=lease.block_count,
        time_left_ms=ms_left(lease.time_left_s),
    )


def lease_from_proto(message: pb.Lease) -> LeaseView:
    """Convert from the wire form. Raises ``Internal`` for a state that this version lacks."""
    state = _STATES_BACK.get(message.state)
    if state is None:
        raise Internal("unknown_lease_state", f"the registry sent lease state {message.state}")
    return LeaseView(
        key=key_from_proto(message.conversation),
        generation=message.generation,
        node_id=message.node_id,
        epoch=message.epoch,
        state=state,
        end_reason=_END_REASONS_BACK.get(message.end_reason),
        token_count=message.token_count,
        block_count=message.block_count,
        time_left_s=message.time_left_ms / 1000,
    )


def query_to_proto(query: LeaseQuery) -> pb.ListLeasesRequest:
    """Convert to the wire form."""
    return pb.ListLeasesRequest(
        node_id=query.node_id,
        tenant=query.tenant,
        state=pb.LEASE_STATE_UNSPECIFIED if query.state is None else _STATES[query.state],
        page_size=query.page_size,
        page_token=query.page_token,
    )


def query_from_proto(request: pb.ListLeasesRequest) -> LeaseQuery:
    """Convert from the wire form. Raises ``InvalidArgument`` for an unknown state."""
    state = _STATES_BACK.get(request.state)
    if state is None and request.state != pb.LEASE_STATE_UNSPECIFIED:
        raise InvalidArgument("invalid_state", f"there is no lease state {request.state}")
    return LeaseQuery(
        node_id=request.node_id,
        tenant=request.tenant,
        state=state,
        page_size=request.page_size,
        page_token=request.page_token,
    )


def page_to_proto(page: LeasePage) -> pb.ListLeasesResponse:
    """Convert to the wire form."""
    return pb.ListLeasesResponse(
        leases=[lease_to_proto(lease) for lease in page.leases],
        next_page_token=page.next_page_token,
    )


def page_from_proto(response: pb.ListLeasesResponse) -> LeasePage:
    """Convert from the wire form. Raises ``Internal``."""
    return LeasePage(
        tuple(lease_from_proto(lease) for lease in response.leases), response.next_page_token
    )


# ---- engines ---------------------------------------------------------------------------------


def grant_to_proto(grant: Grant) -> pb.LeaseGrant:
    """Convert to the wire form."""
    return pb.LeaseGrant(
        conversation=key_to_proto(grant.key),
        generation=grant.generation,
        handle=handle_to_proto(grant.handle),
        fingerprint=fingerprint_to_proto(grant.fingerprint),
        time_left_ms=ms_left(grant.time_left_s),
        ttl_ms=ms_nearest(grant.ttl_s),
    )


def grant_from_proto(message: pb.LeaseGrant) -> Grant:
    """Convert from the wire form. Raises ValueError or ``InvalidArgument``."""
    return Grant(
        key=key_from_proto(message.conversation),
        generation=message.generation,
        handle=handle_from_proto(message.handle),
        fingerprint=fingerprint_from_proto(message.fingerprint),
        time_left_s=message.time_left_ms / 1000,
        ttl_s=message.ttl_ms / 1000,
    )


def report_from_proto(request: pb.AttachRequest) -> EngineReport:
    """Convert an engine's message.

    Malformed grants come out as refused ones, not as errors: one bad lease must
    not cost an engine its stream.
    """
    refused: list[RefusedGrant] = []
    grants = _grants_from_proto(request.grants, refused)
    inventory = None
    if request.HasField("inventory"):
        inventory = _grants_from_proto(request.inventory.held, refused)
    return EngineReport(
        grants=grants,
        ended=tuple(
            Ended(ended.request_id, _END_CAUSES_BACK.get(ended.cause, EndCause.UNKNOWN))
            for ended in request.ended
        ),
        inventory=inventory,
        refused=tuple(refused),
    )


def _grants_from_proto(
    messages: Iterable[pb.LeaseGrant], refused: list[RefusedGrant]
) -> tuple[Grant, ...]:
    grants: list[Grant] = []
    for message in messages:
        try:
            grants.append(grant_from_proto(message))
        except (ValueError, InvalidArgument) as error:
            refused.append(RefusedGrant(message.handle.request_id, str(error)))
    return tuple(grants)
