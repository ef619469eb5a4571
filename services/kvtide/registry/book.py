"""All leases on record, and the only code that moves one from state to state.

Orderings (each is tested by name)

* Time first. Every event applies the time that has passed to a lease before it
  looks at it. At its deadline a lease is over: a renewal, claim or settle that
  arrives at that very moment finds it EXPIRED.
* The lease's deadline before the claim's: a claim never outlives its lease, so a
  claim and a lease that end together end as EXPIRED, not as HELD.
* Ended is final. No event brings an ended lease back.
* A claimed lease is never released. A release that comes while a claim is open
  is kept and carried out when the claim ends: settled as not read, or its
  deadline passed. So is the release of a lease that a claim of another registry
  may still stand on.
* A read reported under any claim, even one that has run out, consumes the lease.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvtide.registry.events import (
    Effect,
    Grant,
    LeaseClaimed,
    LeaseEnded,
    LeaseGranted,
    SendRelease,
)
from kvtide.registry.lease import Claim, Lease, Pinned
from kvtide.registry.ports import ClaimedLease, EndReason, LeaseState

if TYPE_CHECKING:
    from collections.abc import ValuesView

    from kvtide.registry.due import DueQueue, Filed
    from kvtide.registry.rules import LeaseRules


class LeaseBook:
    """Leases by arrival, by engine and by claim.

    Methods append what they did to the ``effects`` list that was handed in.
    """

    def __init__(self, rules: LeaseRules, due: DueQueue[Filed], effects: list[Effect]) -> None:
        self._rules = rules
        self._due = due
        self._effects = effects
        self._next_serial = 1
        self.by_serial: dict[int, Lease] = {}
        """All leases on record, oldest grant first."""
        self._by_engine: dict[tuple[str, str], dict[str, Lease]] = {}
        self._by_claim: dict[str, Lease] = {}

    def find(self, node_id: str, epoch: str, request_id: str) -> Lease | None:
        """The lease of one request of one engine start, ended or not."""
        return self._by_engine.get((node_id, epoch), {}).get(request_id)

    def find_claim(self, claim_id: str) -> Lease | None:
        """The lease that a claim was given on, whether or not the claim still stands."""
        return self._by_claim.get(claim_id)

    def of_engine(self, node_id: str, epoch: str) -> ValuesView[Lease]:
        """The leases of one engine start, ended ones included."""
        return self._by_engine.get((node_id, epoch), {}).values()

    def has_leases(self, node_id: str, epoch: str) -> bool:
        """Whether any lease of this engine start is on record."""
        return (node_id, epoch) in self._by_engine

    def add(self, node_id: str, grant: Grant, claimable_from_s: float, now_s: float) -> Lease:
        """Put a new lease on record, HELD. Its handle's engine id is its epoch."""
        handle = grant.handle
        lease = Lease(
            serial=self._next_serial,
            key=grant.key,
            generation=grant.generation,
            node_id=node_id,
            epoch=handle.engine_id,
            request_id=handle.request_id,
            pinned=self._pinned(grant),
            token_count=handle.token_count,
            block_count=handle.block_count,
            deadline_s=now_s + grant.time_left_s,
            claimable_from_s=claimable_from_s,
        )
        self._next_serial += 1
        self.by_serial[lease.serial] = lease
        self._by_engine.setdefault((node_id, lease.epoch), {})[lease.request_id] = lease
        self._refile(lease)
        self._effects.append(LeaseGranted(lease.view(now_s)))
        return lease

    def refresh(self, lease: Lease, grant: Grant, now_s: float) -> None:
        """Take in a repeated grant of a live lease.

        Every arrival gives an estimate of the engine's deadline that is late by
        the message's travel time, never early. So the earlier estimate of one
        and the same engine deadline is the better one (L2), while a later
        engine deadline is a renewal and lengthens (L3). An earlier engine
        deadline is an older message, overtaken.
        """
        known, reported = lease.pinned, self._pinned(grant)
        if (
            known is None
            or reported is None
            or reported.engine_deadline_s < known.engine_deadline_s
        ):
            return
        estimate_s = now_s + grant.time_left_s
        if reported.engine_deadline_s == known.engine_deadline_s:
            lease.deadline_s = min(lease.deadline_s, estimate_s)
        else:
            lease.deadline_s = max(lease.deadline_s, estimate_s)
            lease.pinned = reported
        if lease.claim is not None:
            lease.claim.deadline_s = min(lease.claim.deadline_s, lease.deadline_s)
        self._refile(lease)

    def claim(self, lease: Lease, claim_id: str, now_s: float) -> ClaimedLease:
        """HELD → CLAIMED, for at most the claim limit and never past the deadline."""
        pinned = lease.pinned
        if lease.state is not LeaseState.HELD or pinned is None:
            raise ValueError(f"a lease that is {lease.state} cannot be claimed")
        deadline_s = min(now_s + self._rules.claim_limit_s, lease.deadline_s)
        lease.state = LeaseState.CLAIMED
        lease.claim = Claim(claim_id, deadline_s)
        lease.claim_ids.append(claim_id)
        lease.last_claim_deadline_s = deadline_s
        self._by_claim[claim_id] = lease
        self._refile(lease)
        self._effects.append(LeaseClaimed(lease.view(now_s), claim_id, deadline_s - now_s))
        # The reader gets the claim's deadline, spelled in the engine's clock.
        shortened_s = lease.deadline_s - deadline_s
        return ClaimedLease(
            claim_id=claim_id,
            node_id=lease.node_id,
            handle=replace(
                pinned.handle, engine_clock_expiry_s=pinned.engine_deadline_s - shortened_s
            ),
            fingerprint=pinned.fingerprint,
            generation=lease.generation,
            claim_time_left_s=deadline_s - now_s,
            ttl_s=pinned.ttl_s,
        )

    def end_claim(self, lease: Lease, now_s: float) -> None:
        """CLAIMED → HELD, or RELEASING if a release waited for this."""
        if lease.state is not LeaseState.CLAIMED:
            return
        lease.state = LeaseState.HELD
        lease.claim = None
        self._refile(lease)
        if lease.pending_release is not None:
            self.release(lease, lease.pending_release, now_s)

    def release(self, lease: Lease, reason: EndReason, now_s: float) -> None:
        """HELD → RELEASING; remembered for later while somebody may read; else nothing."""
        if lease.state is LeaseState.CLAIMED or (
            lease.state is LeaseState.HELD and now_s < lease.claimable_from_s
        ):
            lease.pending_release = lease.pending_release or reason
            self._refile(lease)
        elif lease.state is LeaseState.HELD:
            lease.state = LeaseState.RELEASING
            lease.end_reason = reason
            lease.pending_release = None
            self.send_release(lease)

    def send_release(self, lease: Lease) -> None:
        """Command the engine to free it, for the first time or again."""
        self._effects.append(SendRelease(lease.node_id, lease.epoch, lease.request_id))

    def end(self, lease: Lease, state: LeaseState, reason: EndReason | None, now_s: float) -> None:
        """Any live state → a final one. Ended leases are left as they are."""
        if lease.ended:
            return
        lease.state = state
        lease.end_reason = reason
        lease.pending_release = None
        lease.claim = None
        lease.pinned = None
        lease.ended_at_s = now_s
        self._refile(lease)
        self._effects.append(LeaseEnded(lease.view(now_s)))

    def pass_time(self, lease: Lease, now_s: float) -> None:
        """Apply what time alone has done to a lease."""
        if lease.ended:
            return
        if lease.deadline_s <= now_s:
            self.end(lease, LeaseState.EXPIRED, EndReason.EXPIRED, now_s)
        elif lease.claim is not None and lease.claim.deadline_s <= now_s:
            self.end_claim(lease, now_s)
        elif lease.pending_release is not None and lease.state is LeaseState.HELD:
            self.release(lease, lease.pending_release, now_s)

    def look_at(self, lease: Lease, now_s: float) -> bool:
        """Handle a lease that came up in the due queue; True if it left the record."""
        self.pass_time(lease, now_s)
        if lease.ended and lease.next_due_s(self._rules.keep_ended_s) <= now_s:
            self._forget(lease)
            return True
        self._refile(lease)
        return False

    def _refile(self, lease: Lease) -> None:
        self._due.file(lease, lease.next_due_s(self._rules.keep_ended_s))

    def _forget(self, lease: Lease) -> None:
        del self.by_serial[lease.serial]
        engine = (lease.node_id, lease.epoch)
        of_engine = self._by_engine[engine]
        del of_engine[lease.request_id]
        if not of_engine:
            del self._by_engine[engine]
        for claim_id in lease.claim_ids:
            del self._by_claim[claim_id]

    def _pinned(self, grant: Grant) -> Pinned | None:
        expiry_s = grant.handle.engine_clock_expiry_s
        if expiry_s is None:
            return None
        deadline_s = expiry_s - self._rules.pin_grace_s
        return Pinned(grant.handle, grant.fingerprint, deadline_s, grant.ttl_s)
