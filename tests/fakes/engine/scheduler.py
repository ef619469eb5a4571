"""The engine core: one loop of steps, as vLLM's, over requests, blocks and a connector.

A step schedules, starts remote loads, computes, and then learns which loads
and sends have finished, in the order of vLLM's scheduler. Where vLLM asserts,
this asserts, and an assertion kills the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any

from tests.fakes.engine.blocks import BlockPool, PoolState
from tests.fakes.engine.model import compute, sample
from tests.fakes.engine.request import FINISH_REASONS, EngineRequest, Output, Status
from tests.fakes.engine.tokens import END_ID, decode

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.engine.config import EngineConfig
    from tests.fakes.engine.connector import Connector
    from tests.fakes.engine.faults import Faults
    from tests.fakes.engine.metrics import EngineMetrics

#: How often an engine that only waits for deadlines looks at its clock, in seconds.
IDLE_STEP_S = 0.005


class EngineDeadError(Exception):
    """The engine core died; its server answers 500 and goes away."""


class EngineKilledError(Exception):
    """The process is to be killed where it stands."""


class EngineCore:
    """Requests and blocks of one engine start.

    ``requests`` holds every request whose blocks are in use, finished ones that
    wait for a reader included, as in vLLM.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        connector: Connector,
        faults: Faults,
        metrics: EngineMetrics,
        on_death: Callable[[BaseException], None],
    ) -> None:
        self.config = config
        self.pool = pool
        self.connector = connector
        self.faults = faults
        self.metrics = metrics
        self.requests: dict[str, EngineRequest] = {}
        self.waiting: deque[EngineRequest] = deque()
        self.running: list[EngineRequest] = []
        self.dead: BaseException | None = None
        self.steps = 0
        self._on_death = on_death
        self._finished_recving: set[str] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # ---- what the server calls ------------------------------------------

    def start(self) -> None:
        """Start stepping."""
        self._task = asyncio.create_task(self._run(), name=f"engine-{self.config.node_id}")

    async def stop(self) -> None:
        """Stop stepping, at once; nothing is freed or answered any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def add(self, request: EngineRequest) -> None:
        """Admit a request. Raises EngineDeadError when the engine has died."""
        if self.dead is not None:
            raise EngineDeadError(str(self.dead))
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            request.remote_cached_tokens = params.get("remote_prefill_cached_tokens")
        self.requests[request.request_id] = request
        self.connector.on_new_request(request)
        self.waiting.append(request)
        self.wake()

    def reject(self, params: dict[str, Any] | None) -> None:
        """A request was refused at admission: prefill need not keep its blocks."""
        if params and params.get("do_remote_prefill"):
            self.connector.rejected(params)
            self.wake()

    def abort(self, request_id: str) -> None:
        """End a request whose client went away; unknown and finished ones are ignored."""
        request = self.requests.get(request_id)
        if request is not None and not request.status.finished:
            self._finish(request, Status.FINISHED_ABORTED)
            request.outputs.put_nowait(Output([], "", finish_reason="abort"))
            self.wake()

    def wake(self) -> None:
        """Make the loop step now: something has changed."""
        self._wake.set()

    def pool_state(self) -> PoolState:
        """The pool as it is now."""
        pinned = [r for r in self.requests.values() if r.status.finished]
        return PoolState(
            total_blocks=self.pool.usable_blocks,
            free_blocks=self.pool.free_blocks,
            pinned_requests=len(pinned),
            pinned_blocks=sum(len(request.block_ids) for request in pinned),
            running_requests=len(self.running),
            waiting_requests=len(self.waiting),
        )

    # ---- the loop ---------------------------------------------------------

    async def _run(self) -> None:
        try:
            while True:
                if not self.running:
                    pinned_or_waiting = bool(self.requests) or self.connector.has_work()
                    await self._sleep(IDLE_STEP_S if pinned_or_waiting else None)
                await self.faults.step_gate.wait()
                await self._step()
        except Exception as error:  # noqa: BLE001
            # Whatever breaks in a step takes the whole engine down, as in vLLM.
            self.die(error)

    async def _sleep(self, seconds: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)
        self._wake.clear()

    def die(self, error: BaseException) -> None:
        """End every request with an error and report the death."""
        self.dead = error
        for request in self.requests.values():
            if not (request.status.finished or isinstance(error, EngineKilledError)):
                request.outputs.put_nowait(Output([], "", error=EngineDeadError(str(error))))
        self._on_death(error)

    async def _step(self) -> None:
        self.steps += 1
        self._schedule()
        self.connector.start_loads()
        if any(r.num_computed_tokens < r.num_prompt_tokens - 1 for r in self.running):
            await self.faults.prefill_gate.wait()
        await asyncio.sleep(self.faults.token_delay_s if self.running else 0)
        scheduled = list(self.running)
        for request in scheduled:
            self._compute(request)
        results = self.connector.collect()
        if results.error is not None:
            raise results.error
        failed = self._handle_failed_loads(results.failed_recving)
        for request in scheduled:
            if not request.status.finished and request.status is not Status.PREEMPTED:
                self._sample(request)
        for request_id in failed:
            self._fail(self.requests[request_id])
        self.connector.update_output(results)
        for request_id in results.finished_recving:
            self._finished_loading(request_id)
        for request_id in results.finished_sending:
            assert request_id in self.requests
            self._free(self.requests[request_id])
            if self.faults.take("report_sent_twice"):
                assert request_id in self.requests, f"{request_id} was sent twice"

    # ---- scheduling --------------------------------------------------------

    def _schedule(self) -> None:
        self._grow_running()
        skipped: deque[EngineRequest] = deque()
        while self.waiting and len(self.running) < self.config.max_running_requests:
            request = self.waiting.popleft()
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                if request.request_id not in self._finished_recving:
                    skipped.append(request)
                    continue
                self._adopt_load(request)
                if self.faults.take("preempt_after_load"):
                    self._release_for_preemption(request)
            if not self._admit(request):
                skipped.append(request)
                break
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                skipped.append(request)
        self.waiting.extendleft(reversed(skipped))

    def _admit(self, request: EngineRequest) -> bool:
        """Match, allocate and start one request; False when the pool has no room for it."""
        hit: list[int] = []
        external, load_async = 0, False
        size = self.config.block_size_tokens
        if request.num_computed_tokens == 0:
            # The last token is always computed, since its output is wanted.
            hit = self.pool.lookup(request.token_ids[:-1], request.cache_salt)
            local = len(hit) * size
            external, load_async = self.connector.match(request, local)
            computed = local + external
        else:
            computed = request.num_computed_tokens
        assert computed <= request.num_tokens
        held = len(request.block_ids) or len(hit)
        wanted = -(-(computed if load_async else request.num_tokens) // size) - held
        self.pool.touch(hit)
        fresh = self.pool.allocate(max(0, wanted))
        if fresh is None:
            self.pool.free(hit)
            return False
        if not request.block_ids:
            request.local_hit_blocks = len(hit)
        request.block_ids += hit + fresh
        request.num_computed_tokens = computed
        self.connector.allocated(request, external)
        if request.cached_tokens is None:
            request.cached_tokens = computed
        if load_async:
            request.status = Status.WAITING_FOR_REMOTE_KVS
        else:
            request.status = Status.RUNNING
            self.running.append(request)
        return True

    def _grow_running(self) -> None:
        """Give each running request room for its next token, preempting the latest if need be."""
        for request in list(self.running):
            if request not in self.running:
                continue
            while request.num_tokens > len(request.block_ids) * self.config.block_size_tokens:
                fresh = self.pool.allocate(1)
                if fresh is not None:
                    request.block_ids += fresh
                    continue
                victim = self.running.pop()
                self._release_for_preemption(victim)
                victim.status = Status.PREEMPTED
                self.waiting.appendleft(victim)
                if victim is request:
                    break

    def _release_for_preemption(self, request: EngineRequest) -> None:
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.metrics.preempted()

    # ---- computing ---------------------------------------------------------

    def _compute(self, request: EngineRequest) -> None:
        start = request.num_computed_tokens
        context = self.pool.values(request.block_ids, start)
        self.pool.store(request.block_ids, start, compute(context, request.token_ids[start:]))
        request.num_computed_tokens = request.num_tokens
        self._cache(request)

    def _cache(self, request: EngineRequest) -> None:
        done = request.num_computed_tokens
        self.pool.cache(request.block_ids, request.token_ids[:done], request.cache_salt)

    def _sample(self, request: EngineRequest) -> None:
        sampling = request.sampling
        may_end = len(request.output_token_ids) >= sampling.min_tokens
        values = self.pool.values(request.block_ids, request.num_computed_tokens)
        interval = (1 if sampling.end_at_once else self.config.eos_interval) if may_end else 0
        drawn = sample(values, eos_interval=interval)
        request.output_token_ids.append(drawn.token)
        status = self._stop_status(request, drawn.token, may_end=may_end)
        stopped = status is Status.FINISHED_STOPPED and not sampling.include_stop_text
        request.text = decode(request.output_token_ids[: -1 if stopped else None])
        stop_text = request.find_stop_text()
        output = Output([drawn], "", cached_tokens=request.reported_cached_tokens)
        if status is not None:
            output.kv_transfer_params = params = self._finish(request, status)
            if params is not None and params.get("do_remote_prefill"):
                params["remote_prefill_cached_tokens"] = request.cached_tokens
            output.finish_reason = FINISH_REASONS[status]
        elif stop_text:
            # vLLM finds stop texts in its front end and aborts the request in
            # the core, so that such a turn leaves nothing pinned.
            self._finish(request, Status.FINISHED_ABORTED)
        if stop_text:
            output.finish_reason, request.stop_reason = "stop", stop_text
        output.stop_reason = request.stop_reason
        output.text = request.take_text(finished=output.finish_reason is not None)
        if output.finish_reason is not None:
            self.metrics.answered(request.num_prompt_tokens, len(request.output_token_ids))
        request.outputs.put_nowait(output)
        if self.faults.take("crash_after_tokens") and not self.faults.crash_after_tokens:
            msg = "told to crash in the middle of an answer"
            raise EngineDeadError(msg)
        if self.faults.take("kill_after_tokens") and not self.faults.kill_after_tokens:
            raise EngineKilledError

    def _stop_status(self, request: EngineRequest, token: int, *, may_end: bool) -> Status | None:
        if may_end and token == END_ID and not request.sampling.ignore_eos:
            return Status.FINISHED_STOPPED
        if may_end and token in request.sampling.stop_token_ids:
            request.stop_reason = token
            return Status.FINISHED_STOPPED
        full = request.num_tokens >= self.config.max_model_len_tokens
        if full or len(request.output_token_ids) >= request.sampling.max_tokens:
            return Status.FINISHED_LENGTH_CAPPED
        return None

    # ---- ending ------------------------------------------------------------

    def _finish(self, request: EngineRequest, status: Status) -> dict[str, Any] | None:
        """End a request; its blocks go unless the connector or a running load keeps them."""
        loading = (
            request.status is Status.WAITING_FOR_REMOTE_KVS
            and request.request_id not in self._finished_recving
        )
        self._finished_recving.discard(request.request_id)
        if request in self.running:
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        request.status = status
        keep, params = self.connector.finished(request)
        if not (keep or loading):
            self._free(request)
        return params

    def _fail(self, request: EngineRequest) -> None:
        self._finish(request, Status.FINISHED_ERROR)
        request.outputs.put_nowait(Output([], "", finish_reason="error"))

    def _free(self, request: EngineRequest) -> None:
        assert request.status.finished
        self.pool.free(request.block_ids)
        del self.requests[request.request_id]

    # ---- remote loads ------------------------------------------------------

    def _finished_loading(self, request_id: str) -> None:
        assert request_id in self.requests
        request = self.requests[request_id]
        if request.status is Status.WAITING_FOR_REMOTE_KVS:
            self._finished_recving.add(request_id)
            self.wake()
        else:
            self._free(request)

    def _adopt_load(self, request: EngineRequest) -> None:
        """Take over what a finished load brought (a failed one brought nothing)."""
        self._finished_recving.discard(request.request_id)
        if request.num_computed_tokens == 0:
            self.pool.free(request.block_ids)
            request.block_ids = []
        else:
            self._cache(request)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        request.status = Status.WAITING

    def _handle_failed_loads(self, request_ids: set[str]) -> list[str]:
        """Apply the load failure policy; returns the requests to fail."""
        to_fail = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None or request.status is not Status.WAITING_FOR_REMOTE_KVS:
                continue
            if self.config.load_failure_policy == "recompute":
                request.num_computed_tokens = 0
            else:
                to_fail.append(request_id)
        return to_fail
