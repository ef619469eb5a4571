"""Scheduler side of the connector: what to read back, what to pin, what to let go.

Runs in vLLM's EngineCore, between steps. Every private vLLM attribute that it
touches is listed in ``vllm_surface``.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvtide.connector.fingerprint import block_count, prompt_digest
from kvtide.connector.handle import (
    KVTIDE_KEY,
    REQUIRED_KEYS,
    cut_handle,
    handle_from_params,
    params_from_handle,
)
from kvtide.connector.pins import PIN_GRACE_S, EndCause, Pin, PinTable, TurnId
from kvtide.connector.readback import (
    REUSE_UNSUPPORTED_INPUT,
    EngineCache,
    has_handle,
    plan_readback,
)
from kvtide.connector.turn_outcome import Readback, outcome_params
from kvtide.connector.worker import LeaseMetadata, LeaseWorkerMeta

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(__name__)

#: vLLM's own default of ``decoder_kv_blocks_ttl``, in seconds.
DEFAULT_TTL_S = 480.0
#: How long an engine steps on, to tell prefill that its blocks are not needed: longer
#: than vLLM's handshake may take (5 s, base_worker.py).
NOTIFY_STEPS_S = 6.0
#: Most of the KV pool that leases may keep, by default.
DEFAULT_MAX_PINNED_FRACTION = 0.5


@dataclass(slots=True)
class EngineLoad:
    """What the engine is doing; written by the scheduler thread, read by the agent's."""

    free_blocks: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    last_step_s: float = 0.0


class LeasedNixlScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """vLLM's pull scheduler with verified readbacks and leased pins.

    As prefill it compares each handle with the request's own tokens before
    vLLM's matching sees it (L8). As decode it pins only the turns of a
    conversation, within a budget, and records each pin for the registry.
    """

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        extra = vllm_config.kv_transfer_config.get_from_extra_config
        fraction = float(extra("kvtide_max_pinned_fraction", DEFAULT_MAX_PINNED_FRACTION))
        if not 0.0 <= fraction <= 1.0:
            msg = f"kvtide_max_pinned_fraction must be between 0 and 1, got {fraction}"
            raise ValueError(msg)
        self._idle_step_sleep_s = float(extra("kvtide_idle_step_sleep_ms", 0)) / 1000
        self.pool_blocks: int = kv_cache_config.num_blocks
        self.pins = PinTable(budget_blocks=int(fraction * self.pool_blocks))
        self.load = EngineLoad(free_blocks=self.pool_blocks, last_step_s=time.perf_counter())
        #: Request ids whose release the registry asked for; filled by the agent thread.
        self.release_requests: queue.SimpleQueue[str] = queue.SimpleQueue()

        self.ttl_s = float(extra("decoder_kv_blocks_ttl", DEFAULT_TTL_S))
        # Upstream pins for this long: the advertised time plus the grace (L2).
        self.decoder_kv_blocks_ttl: float = self.ttl_s + PIN_GRACE_S
        self._cache = EngineCache(
            block_size_tokens=self.block_size,
            prefix_cut_possible=not self._is_hma_required,
            readback_possible=bool(self.is_bidirectional_kv_xfer_enabled)
            and not self.use_host_buffer
            and not self._has_mamba,
        )
        self._readbacks: dict[str, Readback] = {}
        self._turns: dict[str, TurnId] = {}
        self._end_causes: dict[str, EndCause] = {}
        self._live_requests: set[str] = set()
        self._kv_cache_manager: KVCacheManager | None = None
        self._step_until_s = 0.0

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Take the cache manager, whose pool the load reports count."""
        self._kv_cache_manager = kv_cache_manager

    # ---- a request arrives -------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Verify what the request wants to read, before any matching."""
        self._live_requests.add(request.request_id)
        params = request.kv_transfer_params
        if params:
            if params.get("do_remote_decode"):
                self._plan_readback(request, params)
            else:
                self._accept_turn(request, params)
        super().on_new_request(request)

    def _plan_readback(self, request: Request, params: dict[str, Any]) -> None:
        asked_tokens = int(params.get("remote_num_tokens") or 0) if has_handle(params) else 0
        tokens = request.prompt_token_ids
        if tokens is None or request.mm_features:
            plan_handle, reason = None, REUSE_UNSUPPORTED_INPUT
        else:
            plan = plan_readback(params, tokens, self._cache, _seed(request))
            plan_handle, reason = plan.handle, plan.reason
        readback = Readback(
            reason=reason,
            handle_tokens=asked_tokens,
            verified_tokens=plan_handle.token_count if plan_handle else 0,
        )
        # The handle is cut before the request can reach upstream's matching:
        # from here on the params hold nothing that was not verified.
        for key in REQUIRED_KEYS:
            params.pop(key, None)
        if plan_handle is not None:
            params.update(params_from_handle(plan_handle))
        self._readbacks[request.request_id] = readback
        if asked_tokens:
            logger.info(
                "kvtide: request %s: handle of %d tokens, %d verified (%s)",
                request.request_id,
                asked_tokens,
                readback.verified_tokens,
                reason,
            )

    def _accept_turn(self, request: Request, params: dict[str, Any]) -> None:
        own = params.get(KVTIDE_KEY)
        if not isinstance(own, Mapping):
            return
        turn = turn_from_params(own)
        if turn is not None:
            self._turns[request.request_id] = turn
        expected = own.get("prompt_digest")
        if not params.get("do_remote_prefill") or not expected or request.abort_immediately:
            # The last case is no prompt at all: vLLM's API server refused the
            # request and lets the engine tell prefill.
            return
        tokens = request.prompt_token_ids
        if tokens is not None and prompt_digest(tokens, _seed(request)) == expected:
            return
        logger.warning(
            "kvtide: request %s: prefill computed other tokens than this prompt's; "
            "recomputing here instead of reading them",
            request.request_id,
        )
        # An empty receive tells prefill to free its blocks, as upstream does for
        # a request that was aborted before it was scheduled.
        self._reqs_need_recv[request.request_id] = (request, [], (), False)
        params["do_remote_prefill"] = False
        self._keep_stepping()

    def _keep_stepping(self) -> None:
        # An idle engine does not step, so a notification that has to wait for the
        # handshake with prefill would wait for the next request as well.
        self._step_until_s = time.perf_counter() + NOTIFY_STEPS_S

    def has_pending_push_work(self) -> bool:
        """Whether the engine must go on stepping although it has no request."""
        return time.perf_counter() < self._step_until_s

    # ---- matching and allocation -------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Offer the verified handle once; after a failed or declined read, never again.

        Upstream would promise a second load that it never starts, and the request
        would wait for ever.
        """
        readback = self._readbacks.get(request.request_id)
        if readback is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[no-any-return]
        readback.cached_tokens = num_computed_tokens
        params = request.kv_transfer_params
        if params.get("_remote_blocks_processed"):
            readback.started_over()
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[no-any-return]

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note what is being loaded, and keep every conversation turn pinnable."""
        params = request.kv_transfer_params
        readback = self._readbacks.get(request.request_id)
        first = params is not None and not params.get("_remote_blocks_processed")
        if readback is not None and first and has_handle(params):
            readback.started(num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.request_id in self._turns:
            # The worker tracks deadlines only of requests that were in a batch.
            self._reqs_in_batch.add(request.request_id)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learn from the workers which reads finished and which pins are gone."""
        super().update_connector_output(connector_output)
        for request_id in connector_output.failed_recving or ():
            readback = self._readbacks.get(request_id)
            if readback is not None:
                readback.failed = True
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, LeaseWorkerMeta):
            for request_id, cause in meta.ended.items():
                if request_id in self.pins:
                    self._end_causes[request_id] = cause
        for request_id in connector_output.finished_sending or ():
            cause = self._end_causes.pop(request_id, EndCause.EXPIRED)
            self.pins.end(request_id, cause)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Add the releases that the registry asked for to this step's metadata."""
        meta = super().build_connector_meta(scheduler_output)
        releases = set()
        while not self.release_requests.empty():
            request_id = self.release_requests.get_nowait()
            if request_id in self.pins:
                releases.add(request_id)
        running = len(scheduler_output.num_scheduled_tokens)
        if not running and not self._live_requests and self._idle_step_sleep_s:
            # An engine that only pins steps a thousand times a second, to no
            # purpose but deadlines and reads; on a CPU that takes others' cores.
            time.sleep(self._idle_step_sleep_s)
        self.load = EngineLoad(
            free_blocks=self._free_blocks(),
            running_requests=running,
            waiting_requests=max(0, len(self._live_requests) - running),
            last_step_s=time.perf_counter(),
        )
        return LeaseMetadata.extend(meta, releases)

    def _free_blocks(self) -> int:
        if self._kv_cache_manager is None:
            return self.pool_blocks
        return int(self._kv_cache_manager.block_pool.get_num_free_blocks())

    # ---- a request ends ----------------------------------------------------

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Decide whether the blocks stay, and tell the router what became of the prompt."""
        request_id = request.request_id
        self._live_requests.discard(request_id)
        readback = self._readbacks.pop(request_id, None)
        turn = self._turns.pop(request_id, None)
        params = request.kv_transfer_params
        if not params or params.get("do_remote_prefill"):
            if params:
                # Aborted before it was scheduled: upstream tells prefill to free
                # its blocks.
                self._keep_stepping()
            return super().request_finished(request, block_ids)  # type: ignore[no-any-return]
        if params.get("do_remote_decode"):
            delay_free, answer = super().request_finished(request, block_ids)
            if answer is not None and readback is not None:
                tokens = request.prompt_token_ids or []
                answer[KVTIDE_KEY] = outcome_params(
                    readback,
                    prompt_tokens=request.num_prompt_tokens,
                    prompt_digest=prompt_digest(tokens, _seed(request)),
                    threshold_tokens=self.kv_recompute_threshold,
                )
                # Upstream tells decode no deadline for prefill's blocks, so a read
                # that ends after they were freed would pass for good.
                answer["remote_blocks_expiry_time"] = self._reqs_need_send.get(request_id)
            return delay_free, answer
        return self._finish_decode(request, block_ids, turn), None

    def _finish_decode(
        self, request: Request, block_ids: tuple[list[int], ...], turn: TurnId | None
    ) -> bool:
        """Pin the turn's blocks and grant their lease; True if they stay pinned."""
        # The last sampled token has no KV yet. With asynchronous scheduling the
        # engine may already count it as computed while the step is in flight.
        token_count = min(request.num_computed_tokens, request.num_tokens - 1)
        refusal = self._refuse_pin(request, block_ids, token_count)
        if turn is None or refusal is not None:
            if turn is not None:
                logger.info("kvtide: request %s: no lease (%s)", request.request_id, refusal)
            # Without this the worker would remember the request for ever.
            self._stop_heartbeat(request.request_id)
            self._reqs_not_processed.add(request.request_id)
            return False

        delay_free, params = super().request_finished(request, block_ids)
        if not delay_free or params is None:
            return bool(delay_free)
        handle = handle_from_params(params, self.block_size)
        handle = cut_handle(handle, min(token_count, handle.token_count))
        deadline_s = self._reqs_need_send[request.request_id] - PIN_GRACE_S
        self.pins.add(
            Pin(
                turn=turn,
                handle=handle,
                token_ids=list(request.all_token_ids[: handle.token_count]),
                deadline_s=deadline_s,
                ttl_s=self.ttl_s,
                seed=_seed(request),
            )
        )
        return True

    def _refuse_pin(  # noqa: PLR0911 - one return for each reason reads best
        self, request: Request, block_ids: tuple[list[int], ...], token_count: int
    ) -> str | None:
        """Why these blocks must not be pinned, or None."""
        blocks = sum(len(group) for group in block_ids)
        if request.status not in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        ):
            return f"status {request.status.name}"
        if not self.is_bidirectional_kv_xfer_enabled:
            return "bidirectional_kv_xfer is off"
        if request.mm_features or request.prompt_token_ids is None:
            return "the input is not plain tokens"
        if token_count < 1 or not blocks:
            return "nothing was computed"
        if len(block_ids) > 1 and block_count(token_count, self.block_size) != block_count(
            request.num_computed_tokens, self.block_size
        ):
            return "its last block is not computed yet, and several block groups can't be cut"
        if not self.pins.has_room_for(blocks):
            return f"{blocks} more blocks exceed the pin budget"
        return None


def turn_from_params(own: Mapping[str, Any]) -> TurnId | None:
    """Read the turn that the router named; None unless all three parts are there."""
    tenant, conversation = own.get("tenant"), own.get("conversation_id")
    generation = own.get("generation")
    if (
        isinstance(tenant, str)
        and isinstance(conversation, str)
        and isinstance(generation, int)
        and tenant
        and conversation
    ):
        return TurnId(tenant, conversation, generation)
    return None


def _seed(request: Request) -> bytes:
    """What the KV depends on besides the tokens: the LoRA adapter's name."""
    lora = request.lora_request
    return b"" if lora is None else f"lora:{lora.lora_name}".encode()
