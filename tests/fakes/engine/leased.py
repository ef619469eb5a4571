"""kvtide's connector on the fake engine.

The decisions are the real ones: which handle may be read, what is pinned, and
what the agent reports come from ``kvtide.connector``'s own modules. What is
imitated here is only how ``LeasedNixlScheduler`` and ``LeasedNixlWorker`` hang
them into vLLM.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtide.connector.agent import EngineAgent, EngineIdentity
from kvtide.connector.engine_settings import EngineSettings
from kvtide.connector.fingerprint import block_count, prompt_digest
from kvtide.connector.handle import (
    KVTIDE_KEY,
    REQUIRED_KEYS,
    cut_handle,
    handle_from_params,
    params_from_handle,
)
from kvtide.connector.pins import PIN_GRACE_S, EndCause, Pin, PinTable, TurnId
from kvtide.connector.readback import EngineCache, has_handle, plan_readback
from kvtide.connector.turn_outcome import Readback, outcome_params
from tests.fakes.engine.nixl import Load, StockConnector
from tests.fakes.engine.request import EngineRequest, Status

if TYPE_CHECKING:
    from tests.fakes.engine.connector import StepResults

#: Most of the pool that leases may keep.
MAX_PINNED_FRACTION = 0.5


@dataclass(slots=True)
class EngineLoad:
    """What the engine is doing now, for its heartbeats."""

    free_blocks: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    last_step_s: float = 0.0


class LeasedConnector(StockConnector):
    """The stock connector with verified readbacks and leased pins."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        size = self.config.block_size_tokens
        self.pins = PinTable(int(MAX_PINNED_FRACTION * self.config.block_count))
        self._last_step_s = self.clock.now_s()
        self.release_requests: queue.SimpleQueue[str] = queue.SimpleQueue()
        #: Cleared while the engine hangs: a stopped process sends no heartbeats.
        self.awake = threading.Event()
        self.awake.set()
        self._cache = EngineCache(size, readback_possible=self.config.bidirectional)
        self._readbacks: dict[str, Readback] = {}
        self._turns: dict[str, TurnId] = {}
        self._live: dict[str, EngineRequest] = {}
        self._end_causes: dict[str, EndCause] = {}
        self._agent: EngineAgent | None = None

    @property
    def ttl_s(self) -> float:
        """The advertised retention and the grace: blocks never go before readers know."""
        return self.config.decoder_kv_blocks_ttl_s + PIN_GRACE_S

    def start_agent(self, url: str) -> None:
        """Join the fleet, if the configuration names one."""
        if not self.config.registry_address:
            return
        config = self.config
        self._agent = EngineAgent(
            settings=EngineSettings(
                registry=config.registry_address,
                health=config.health_address or config.registry_address,
                url=url,
                node_id=config.node_id,
            ),
            identity=EngineIdentity(
                node_id=config.node_id,
                epoch=self.engine_id,
                is_prefill=config.role == "prefill",
                url=url,
                models=(config.model,),
                vllm_version=config.vllm_version,
                block_size_tokens=config.block_size_tokens,
                block_count=config.block_count,
                kv_recompute_threshold_tokens=config.kv_recompute_threshold_tokens,
                ttl_s=config.decoder_kv_blocks_ttl_s,
                max_model_len_tokens=config.max_model_len_tokens,
            ),
            pins=self.pins,
            release=self.release_requests.put,
            load=self._current_load,
            engine_now_s=self.clock.now_s,
        )
        self._agent.start()

    def stop_agent(self) -> None:
        """Leave the fleet. Blocks for a moment: call it off the event loop."""
        self.awake.set()
        if self._agent is not None:
            self._agent.stop()

    def _current_load(self) -> EngineLoad:
        self.awake.wait()
        live = list(self._live.values())
        running = sum(request.status is Status.RUNNING for request in live)
        return EngineLoad(
            free_blocks=self.pool.free_blocks,
            running_requests=running,
            waiting_requests=len(live) - running,
            last_step_s=self._last_step_s,
        )

    # ---- scheduler side ------------------------------------------------------

    def on_new_request(self, request: EngineRequest) -> None:
        """Verify what the request wants to read, before any matching."""
        self._live[request.request_id] = request
        params = request.kv_transfer_params
        if params:
            if params.get("do_remote_decode"):
                self._plan_readback(request, params)
            else:
                self._accept_turn(request, params)
        super().on_new_request(request)

    def _plan_readback(self, request: EngineRequest, params: dict[str, Any]) -> None:
        asked = int(params.get("remote_num_tokens") or 0) if has_handle(params) else 0
        plan = plan_readback(params, request.prompt_token_ids, self._cache)
        for key in REQUIRED_KEYS:
            params.pop(key, None)
        if plan.handle is not None:
            params.update(params_from_handle(plan.handle))
        self._readbacks[request.request_id] = Readback(
            reason=plan.reason,
            handle_tokens=asked,
            verified_tokens=plan.handle.token_count if plan.handle else 0,
        )

    def _accept_turn(self, request: EngineRequest, params: dict[str, Any]) -> None:
        own = params.get(KVTIDE_KEY)
        if not isinstance(own, Mapping):
            return
        turn = _turn_from_params(own)
        if turn is not None:
            self._turns[request.request_id] = turn
        expected = own.get("prompt_digest")
        if not params.get("do_remote_prefill") or not expected:
            return
        if prompt_digest(request.prompt_token_ids) == expected:
            return
        self.need_recv.append(Load(request.request_id, dict(params), (), awaited=False))
        params["do_remote_prefill"] = False

    def match(self, request: EngineRequest, computed_tokens: int) -> tuple[int, bool]:
        """Offer the verified handle once; after a failed or declined read, never again."""
        readback = self._readbacks.get(request.request_id)
        params = request.kv_transfer_params
        if readback is None or params is None:
            return super().match(request, computed_tokens)
        readback.cached_tokens = computed_tokens
        if params.get("_remote_blocks_processed"):
            readback.started_over()
            return 0, False
        return super().match(request, computed_tokens)

    def allocated(self, request: EngineRequest, external_tokens: int) -> None:
        """Note what is being loaded, and keep every conversation turn pinnable."""
        params = request.kv_transfer_params
        readback = self._readbacks.get(request.request_id)
        first = params is not None and not params.get("_remote_blocks_processed")
        if readback is not None and params is not None and first and has_handle(params):
            readback.started(external_tokens)
        super().allocated(request, external_tokens)
        if request.request_id in self._turns:
            self.batched.add(request.request_id)

    def update_output(self, results: StepResults) -> None:
        """Learn which reads failed and which pins are gone."""
        super().update_output(results)
        for request_id in results.failed_recving:
            if request_id in self._readbacks:
                self._readbacks[request_id].failed = True
        for request_id in results.finished_sending:
            cause = self._end_causes.pop(request_id, EndCause.EXPIRED)
            self.pins.end(request_id, cause)
        self._last_step_s = self.clock.now_s()

    def finished(self, request: EngineRequest) -> tuple[bool, dict[str, Any] | None]:
        """Decide whether the blocks stay, and tell the router what became of the prompt."""
        self._live.pop(request.request_id, None)
        readback = self._readbacks.pop(request.request_id, None)
        turn = self._turns.pop(request.request_id, None)
        params = request.kv_transfer_params
        if not params or params.get("do_remote_prefill"):
            return super().finished(request)
        if params.get("do_remote_decode"):
            keep, answer = super().finished(request)
            if answer is not None and readback is not None:
                answer[KVTIDE_KEY] = outcome_params(
                    readback,
                    prompt_tokens=request.num_prompt_tokens,
                    prompt_digest=prompt_digest(request.prompt_token_ids),
                    threshold_tokens=self.config.kv_recompute_threshold_tokens,
                )
            return keep, answer
        return self._finish_decode(request, turn), None

    def _finish_decode(self, request: EngineRequest, turn: TurnId | None) -> bool:
        normal = request.status in (Status.FINISHED_STOPPED, Status.FINISHED_LENGTH_CAPPED)
        token_count = min(request.num_computed_tokens, request.num_tokens - 1)
        if (
            turn is None
            or not normal
            or not self.config.bidirectional
            or token_count < 1
            or not self.pins.has_room_for(len(request.block_ids))
        ):
            self.not_processed.add(request.request_id)
            self._heartbeats.pop(request.request_id, None)
            return False
        _keep, params = self.pin(request, as_prefill=False)
        self._heartbeats.pop(request.request_id, None)
        assert params is not None
        handle = handle_from_params(params, self.config.block_size_tokens)
        if block_count(token_count, handle.block_size_tokens) <= handle.block_count:
            handle = cut_handle(handle, min(token_count, handle.token_count))
        self.pins.add(
            Pin(
                turn=turn,
                handle=handle,
                token_ids=request.token_ids[: handle.token_count],
                deadline_s=self.need_send[request.request_id] - PIN_GRACE_S,
                ttl_s=self.config.decoder_kv_blocks_ttl_s,
            )
        )
        return True

    # ---- worker side ---------------------------------------------------------

    def start_loads(self) -> None:
        """Start this step's reads, then drop the pins that the registry released."""
        super().start_loads()
        while not self.release_requests.empty():
            request_id = self.release_requests.get_nowait()
            if request_id not in self.pins:
                continue
            if self.worker.pinned_until_s.pop(request_id, None) is None:
                continue
            self.worker.in_batch.discard(request_id)
            self.worker.results.finished_sending.add(request_id)
            self._end_causes[request_id] = EndCause.RELEASED

    def take_notifications(self) -> set[str]:
        """As upstream; what a reader finished is ended as read."""
        done = super().take_notifications()
        self._end_causes.update(dict.fromkeys(done & self._pinned(done), EndCause.READ))
        return done

    def _pinned(self, request_ids: set[str]) -> set[str]:
        return {request_id for request_id in request_ids if request_id in self.pins}


def _turn_from_params(own: Mapping[str, Any]) -> TurnId | None:
    tenant, conversation = own.get("tenant"), own.get("conversation_id")
    generation = own.get("generation")
    if isinstance(tenant, str) and isinstance(conversation, str) and isinstance(generation, int):
        return TurnId(tenant, conversation, generation) if tenant and conversation else None
    return None
