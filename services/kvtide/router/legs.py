"""The two legs of one turn: which node, which body, and what to do when a node fails.

Retries keep two rules. A lease is offered once: after a failed prefill leg that had it, nobody
can tell whether it was read, so the next try goes without. And a decode leg moves to another
node only when its node certainly never saw it, for prefill's blocks can be read only once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtide.health.ports import Node, NodeRole
from kvtide.registry.ports import ClaimedLease, ReadOutcome
from kvtide.router.engines import DecodeStream, EngineClient, LegFailed, PrefillAnswer, Refused
from kvtide.router.errors import (
    EngineFailed,
    EngineRefused,
    EngineUnavailable,
    ModelNotFound,
    NoReadyEngine,
)
from kvtide.router.placement import choose_node, model_is_known
from kvtide.router.shaping import decode_body, prefill_body, prefill_params
from kvtide.runtime import KvtideError, get_logger

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from kvtide.router.fleet import FleetView
    from kvtide.router.metrics import RouterMetrics
    from kvtide.router.requests import TurnRequest

__all__ = ["LegPorts", "TurnLegs"]

_PLAIN_PREFILL_ATTEMPTS = 2
_DECODE_ATTEMPTS = 2
_SERVER_ERROR = 500
_SERVICE_UNAVAILABLE = 503
# With these an engine turns a request away before it looks at any KV. Others, such as a proxy's
# 408 or 499, may come at any time.
_REFUSED_AT_ADMISSION = frozenset({400, 401, 403, 404, 405, 413, 415, 422, 429})

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LegPorts:
    """What every turn's legs go through."""

    fleet: FleetView
    engines: EngineClient
    metrics: RouterMetrics


class TurnLegs:
    """The legs of one turn. Its attributes are true at every moment, also half-way through."""

    def __init__(self, ports: LegPorts, request: TurnRequest, turn_id: str) -> None:
        self._fleet = ports.fleet
        self._engines = ports.engines
        self._metrics = ports.metrics
        self._request = request
        self._turn_id = turn_id
        self._decode_held = False
        self.prefill_node: Node | None = None
        """The node of the last prefill leg that was tried."""
        self.decode_node: Node | None = None
        """The node of the last decode leg that was tried."""
        self.read_outcome = ReadOutcome.NOT_READ
        """What became of the claimed lease, as far as can be told now."""
        self.lease_failed = False
        """The prefill leg that had the lease failed."""

    def require_nodes(self, *roles: NodeRole) -> None:
        """Fail early. Raises `ModelNotFound`, or `NoReadyEngine` for the first role without."""
        if not model_is_known(self._fleet.nodes, self._request.model):
            raise ModelNotFound(self._request.model)
        for role in roles:
            if self._choose(role) is None:
                raise NoReadyEngine(role, self._request.model)

    async def prefill(self, claimed: ClaimedLease | None) -> PrefillAnswer:
        """Run prefill: with the lease if there is one, plainly if that fails or there is none.

        Raises `EngineRefused` when an engine finds fault with the request, and `NoReadyEngine`,
        `EngineUnavailable` or `EngineFailed` when no try succeeded.
        """
        tried_with_lease: set[str] = set()
        tried: set[str] = set()
        failure: LegFailed | Refused | None = None
        if claimed is not None:
            node = self._choose(NodeRole.PREFILL)
            if node is not None:
                answer = await self._prefill_on(node, claimed)
                if isinstance(answer, PrefillAnswer):
                    return answer
                failure = answer
                self.lease_failed = True
                tried_with_lease.add(node.info.node_id)
        for _ in range(_PLAIN_PREFILL_ATTEMPTS):
            # Rather a node that did not fail at all; else the one that failed with the lease,
            # which may have been the lease's fault.
            node = self._choose(NodeRole.PREFILL, exclude=tried | tried_with_lease) or self._choose(
                NodeRole.PREFILL, exclude=tried
            )
            if node is None:
                break
            answer = await self._prefill_on(node, None)
            if isinstance(answer, PrefillAnswer):
                return answer
            failure = answer
            tried.add(node.info.node_id)
        if failure is None:
            raise NoReadyEngine(NodeRole.PREFILL, self._request.model)
        raise _leg_error(NodeRole.PREFILL, failure)

    async def decode(self, params: Mapping[str, Any], *, prefer: str = "") -> DecodeStream:
        """Start decode, on the node `prefer` if that is ready; `release` counts it out.

        `params` are the leg's `kv_transfer_params`. Raises `EngineRefused`, `NoReadyEngine`,
        `EngineUnavailable` or `EngineFailed`.
        """
        body = decode_body(self._request.body, params)
        unreachable: set[str] = set()
        failure: LegFailed | None = None
        for _ in range(_DECODE_ATTEMPTS):
            node = self._choose(NodeRole.DECODE, prefer=prefer, exclude=unreachable)
            if node is None:
                break
            self.release()
            self._hold(node)
            answer = await self._engines.decode(
                node, self._request.path, body, self._request.engine_headers
            )
            if isinstance(answer, DecodeStream):
                return answer
            self._note_failure(NodeRole.DECODE, node, answer)
            if isinstance(answer, Refused):
                raise _refusal(answer)
            failure = answer
            if answer.reached_engine:
                break
            unreachable.add(node.info.node_id)
        if failure is None:
            raise NoReadyEngine(NodeRole.DECODE, self._request.model)
        raise _leg_error(NodeRole.DECODE, failure)

    def release(self) -> None:
        """The decode leg is over. Harmless when there is none."""
        if self._decode_held and self.decode_node is not None:
            self._fleet.end_leg(self.decode_node)
        self._decode_held = False

    def decode_broke_off(self, failure: LegFailed) -> None:
        """Note that the answer of the decode leg broke off."""
        if self.decode_node is not None:
            self._note_failure(NodeRole.DECODE, self.decode_node, failure)

    def _hold(self, node: Node) -> None:
        self.decode_node = node
        self._fleet.begin_leg(node)
        self._decode_held = True

    def _choose(
        self, role: NodeRole, *, prefer: str = "", exclude: Collection[str] = ()
    ) -> Node | None:
        return choose_node(
            self._fleet.nodes,
            role,
            self._request.model,
            self._fleet.in_flight,
            prefer=prefer,
            exclude=exclude,
        )

    async def _prefill_on(
        self, node: Node, claimed: ClaimedLease | None
    ) -> PrefillAnswer | Refused | LegFailed:
        """One try on one node. Raises `EngineRefused` when the request is to blame."""
        self.prefill_node = node
        body = prefill_body(self._request.body, prefill_params(claimed))
        if claimed is not None:
            self.read_outcome = ReadOutcome.UNKNOWN
        self._fleet.begin_leg(node)
        try:
            answer = await self._engines.prefill(
                node, self._request.path, body, self._request.engine_headers
            )
        finally:
            self._fleet.end_leg(node)
        if claimed is not None:
            self.read_outcome = _read_outcome(answer)
        if isinstance(answer, PrefillAnswer):
            if not answer.params:
                # Decode will compute the whole prompt again, and nothing else would tell.
                self._metrics.leg_failed(NodeRole.PREFILL, "no_params")
                _log.warning("prefill_without_params", node_id=node.info.node_id)
            return answer
        self._note_failure(NodeRole.PREFILL, node, answer)
        if isinstance(answer, Refused) and answer.status < _SERVER_ERROR:
            raise _refusal(answer)
        return answer

    def _note_failure(self, role: NodeRole, node: Node, failure: Refused | LegFailed) -> None:
        if isinstance(failure, Refused):
            kind, detail = f"status_{failure.status // 100}xx", f"HTTP status {failure.status}"
        else:
            kind, detail = failure.kind, failure.detail
        self._metrics.leg_failed(role, kind)
        _log.warning(
            "leg_failed",
            turn_id=self._turn_id,
            leg=role.value,
            node_id=node.info.node_id,
            kind=kind,
            detail=detail,
        )


def _read_outcome(answer: PrefillAnswer | Refused | LegFailed) -> ReadOutcome:
    if isinstance(answer, PrefillAnswer):
        return answer.read_outcome
    if isinstance(answer, Refused):
        nothing_read = answer.status in _REFUSED_AT_ADMISSION
    else:
        nothing_read = not answer.reached_engine
    return ReadOutcome.NOT_READ if nothing_read else ReadOutcome.UNKNOWN


def _refusal(refused: Refused) -> EngineRefused:
    return EngineRefused(
        refused.status,
        refused.body,
        content_type=refused.content_type,
        retry_after=refused.retry_after,
    )


def _leg_error(role: NodeRole, failure: LegFailed | Refused) -> KvtideError:
    if isinstance(failure, Refused):
        detail = f"it answered with HTTP status {failure.status}"
        if failure.status == _SERVICE_UNAVAILABLE:
            return EngineUnavailable(role, detail)
        return EngineFailed(role, detail)
    if failure.reached_engine:
        return EngineFailed(role, failure.summary)
    return EngineUnavailable(role, failure.summary)
