"""One turn, from the checked request to the last byte of the answer.

place → claim → prefill leg → decode leg → relay → settle. A turn is an async context manager
that iterates over the bytes of the answer, for the HTTP handlers and the gRPC servicer alike.
Leaving the context ends the turn, however it is left: its end is one plain function without an
await, so that no cancellation can come in between, and it settles at most once.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from kvtide.health.ports import NodeRole
from kvtide.registry.ports import ClaimResult, ReadOutcome, Settlement
from kvtide.router.answer import Answer
from kvtide.router.errors import EngineRefused, NoReadyEngine, RouterDraining
from kvtide.router.legs import LegPorts, TurnLegs
from kvtide.router.report import Outcome, Reuse, TurnRecord, TurnReport
from kvtide.router.shaping import decode_params
from kvtide.runtime import NotFound, get_logger

if TYPE_CHECKING:
    from types import TracebackType

    from kvtide.router.engines import PrefillAnswer
    from kvtide.router.leases import LeaseDesk
    from kvtide.router.report import TurnHistory
    from kvtide.router.requests import TurnRequest
    from kvtide.runtime import Clock

__all__ = ["Turn", "TurnEngine", "TurnPorts"]

# A decode engine pins what it finished, not what it gave up.
_UNPINNED_FINISHES = frozenset({"abort", "error"})

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TurnPorts:
    """What every turn goes through."""

    legs: LegPorts
    desk: LeaseDesk
    history: TurnHistory
    clock: Clock
    readback_enabled: bool


class TurnEngine:
    """Opens turns, and knows which are running."""

    def __init__(self, ports: TurnPorts) -> None:
        self.ports = ports
        self.draining = False
        self._running: dict[Turn, asyncio.Task[Any] | None] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, request: TurnRequest) -> Turn:
        """A turn for `async with`.

        Entering it raises what stands in the way of an answer: `RouterDraining`,
        `ModelNotFound`, `NoReadyEngine`, `EngineUnavailable`, `EngineFailed` or `EngineRefused`.
        """
        return Turn(self, request)

    async def drain(self, timeout_s: float) -> None:
        """Take no new turns; let the running ones finish for `timeout_s`, then cancel them."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            _log.warning("drain_timed_out", turns=len(self._running))
            for task in self._running.values():
                if task is not None:
                    task.cancel()
            # They end at their next await, which neither engine nor client can hold up.
            await self._idle.wait()

    def begin(self, turn: Turn) -> None:
        """Count a turn in."""
        self._running[turn] = asyncio.current_task()
        self._idle.clear()
        self.ports.legs.metrics.turn_started()

    def end(self, turn: Turn, record: TurnRecord) -> None:
        """Count a turn out, and keep its record."""
        self._running.pop(turn, None)
        if not self._running:
            self._idle.set()
        self.ports.legs.metrics.turn_ended(turn.request.path, record)
        self.ports.history.add(record)
        _log_turn(turn.request, record)


class Turn:
    """One turn. Enter its context once, then iterate over the bytes of the answer."""

    def __init__(self, engine: TurnEngine, request: TurnRequest) -> None:
        self.request = request
        self.turn_id = f"turn-{uuid.uuid4().hex}"
        self._engine = engine
        self._ports = engine.ports
        self._legs = TurnLegs(engine.ports.legs, request, self.turn_id)
        self._started_s = engine.ports.clock.monotonic_s()
        self._first_byte_s: float | None = None
        self._opened: ClaimResult | None = None
        self._prefilled: PrefillAnswer | None = None
        self._reuse = ""
        self._answer: Answer | None = None
        self._settled = False
        self._ended = False

    @property
    def report(self) -> TurnReport:
        """What became of the prompt, as far as it is known; complete inside the context."""
        prefill, decode = self._legs.prefill_node, self._legs.decode_node
        counts = self._prefilled
        return TurnReport(
            turn_id=self.turn_id,
            prefill_node_id=prefill.info.node_id if prefill else "",
            decode_node_id=decode.info.node_id if decode else "",
            prompt_tokens=counts.prompt_tokens if counts else 0,
            pulled_tokens=counts.pulled_tokens if counts else 0,
            cached_tokens=counts.cached_tokens if counts else 0,
            recomputed_tokens=counts.recomputed_tokens if counts else 0,
            reuse=Reuse.PREFILL_FAILED if self._legs.lease_failed else self._reuse,
            decoder_kv_blocks_ttl_ms=(
                round(decode.info.decoder_kv_blocks_ttl_s * 1000) if decode else 0
            ),
            kv_recompute_threshold_tokens=(
                prefill.info.kv_recompute_threshold_tokens if prefill else 0
            ),
        )

    @property
    def is_event_stream(self) -> bool:
        """Whether the answer comes as server-sent events, else as one JSON body."""
        return self._answer is not None and self._answer.is_event_stream

    @property
    def content_type(self) -> str:
        """The engine's Content-Type for the answer."""
        return self._answer.content_type if self._answer else ""

    async def __aenter__(self) -> Self:
        self._engine.begin(self)
        try:
            await self._begin()
        except BaseException as error:
            self._end(_outcome_of(error))
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        answer = self._answer
        if answer is not None and answer.exhausted:
            self._end(Outcome.FAILED if answer.failed else Outcome.COMPLETED)
        else:
            # Its reader left it half-way.
            self._end(Outcome.ABORTED)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next bytes of the answer, never empty. See `Answer.read` for how it ends."""
        data = await self._answer.read() if self._answer else b""
        if not data:
            raise StopAsyncIteration
        if self._first_byte_s is None:
            self._first_byte_s = self._ports.clock.monotonic_s()
        return data

    async def _begin(self) -> None:
        if self._engine.draining:
            raise RouterDraining
        if self.request.undivided:
            self._legs.require_nodes(NodeRole.DECODE)
            self._reuse = Reuse.NOT_DISAGGREGATED
            await self._start_decode()
            return
        self._legs.require_nodes(NodeRole.PREFILL, NodeRole.DECODE)
        await self._claim()
        claimed = self._opened.claimed if self._opened else None
        self._prefilled = await self._legs.prefill(claimed)
        if claimed is not None:
            self._reuse = self._prefilled.reuse or Reuse.UNREPORTED
        await self._start_decode()

    async def _claim(self) -> None:
        """Open the turn at the registry, and claim what its prefill may read."""
        key = self.request.key
        if not (self._ports.readback_enabled and self.request.readback):
            self._reuse = Reuse.READBACK_OFF
        elif key is None:
            self._reuse = Reuse.NO_SESSION
        else:
            self._opened = await self._ports.desk.claim(key)
            if self._opened is None:
                self._reuse = Reuse.REGISTRY_UNAVAILABLE
            elif self._opened.claimed is None:
                self._reuse = self._opened.miss_reason

    async def _start_decode(self) -> None:
        prefilled, opened = self._prefilled, self._opened
        params = decode_params(
            prefilled.params if prefilled else {},
            self.request.key,
            opened.generation if opened else None,
            prefilled.prompt_digest if prefilled else "",
        )
        prefer = opened.claimed.node_id if opened and opened.claimed else ""
        self._answer = Answer(
            await self._legs.decode(params, prefer=prefer),
            wants_usage=self.request.wants_usage,
            on_failure=self._legs.decode_broke_off,
            on_finish=self._finished,
        )
        await self._answer.prepare()

    def _finished(self, reason: str) -> None:
        self._settle(grant_expected=reason not in _UNPINNED_FINISHES)

    def _settle(self, *, grant_expected: bool) -> None:
        key, opened = self.request.key, self._opened
        if self._settled or key is None or opened is None:
            return
        self._settled = True
        claim_id, read_outcome = "", ReadOutcome.UNSPECIFIED
        if opened.claimed is not None:
            claim_id, read_outcome = opened.claimed.claim_id, self._legs.read_outcome
        self._ports.desk.settle(
            Settlement(key, opened.generation, claim_id, read_outcome, grant_expected)
        )

    def _end(self, outcome: Outcome) -> None:
        if self._ended:
            return
        self._ended = True
        answer = self._answer
        if answer is not None:
            answer.close()
            if answer.finish_reason:
                # The engine did all its work, whether or not the client stayed to the end.
                outcome = Outcome.COMPLETED
        self._legs.release()
        self._settle(grant_expected=False)
        record = TurnRecord(
            report=self.report,
            outcome=outcome,
            finish_reason=answer.finish_reason if answer else "",
            completion_tokens=answer.completion_tokens if answer else 0,
            ttft_ms=None if self._first_byte_s is None else self._ms_until(self._first_byte_s),
            total_ms=self._ms_until(self._ports.clock.monotonic_s()),
        )
        self._engine.end(self, record)

    def _ms_until(self, moment_s: float) -> float:
        return round((moment_s - self._started_s) * 1000, 3)


def _outcome_of(error: BaseException) -> Outcome:
    """How a turn ended that never got to its answer."""
    if isinstance(error, EngineRefused):
        return Outcome.REFUSED
    if isinstance(error, NotFound | NoReadyEngine | RouterDraining):
        return Outcome.REJECTED
    return Outcome.FAILED if isinstance(error, Exception) else Outcome.ABORTED


def _log_turn(request: TurnRequest, record: TurnRecord) -> None:
    report = record.report
    _log.info(
        "turn.finished",
        turn_id=report.turn_id,
        status=record.outcome.value,
        tenant=request.tenant,
        conversation_id=request.key.conversation_id if request.key else None,
        model=request.model,
        prefill_node_id=report.prefill_node_id,
        decode_node_id=report.decode_node_id,
        prompt_tokens=report.prompt_tokens,
        pulled_tokens=report.pulled_tokens,
        cached_tokens=report.cached_tokens,
        recomputed_tokens=report.recomputed_tokens,
        completion_tokens=record.completion_tokens,
        reuse=report.reuse,
        decoder_kv_blocks_ttl_ms=report.decoder_kv_blocks_ttl_ms,
        kv_recompute_threshold_tokens=report.kv_recompute_threshold_tokens,
        ttft_ms=record.ttft_ms,
        total_ms=record.total_ms,
    )
