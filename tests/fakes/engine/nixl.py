"""Upstream's NIXL pull connector, as it behaves in vLLM 0.32, its faults included.

It trusts a handle's length, takes the remote's blocks by suffix, pins every
finished turn of decode, and promises a second load that it never starts.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.fakes.engine.connector import StepResults
from tests.fakes.engine.request import EngineRequest, Status
from tests.fakes.engine.transport import Peer, SideChannelClient, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from tests.fakes.engine.blocks import BlockPool
    from tests.fakes.engine.config import EngineClock, EngineConfig
    from tests.fakes.engine.metrics import EngineMetrics

#: A read is declined when the blocks expire within this many seconds.
EXPIRY_MARGIN_S = 5.0

REMOTE_KEYS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


@dataclass(frozen=True, slots=True)
class Load:
    """One request's wish to read, or only to notify (no ``local_blocks``)."""

    request_id: str
    params: Mapping[str, Any]
    local_blocks: tuple[int, ...]
    awaited: bool
    """The scheduler waits for the end of it."""


@dataclass(slots=True)
class _WorkerState:
    """What vLLM's worker process keeps between steps."""

    in_batch: set[str] = field(default_factory=set)
    """Requests that took part in a batch and may yet be pinned (``_reqs_to_process``)."""
    pinned_until_s: dict[str, float] = field(default_factory=dict)
    """Deadlines of finished requests (``_reqs_to_send``)."""
    notifications: list[str] = field(default_factory=list)
    peers: dict[str, Peer] = field(default_factory=dict)
    handshakes: dict[str, asyncio.Task[Peer]] = field(default_factory=dict)
    """Those under way, by engine id: whoever needs the same peer waits for the same one."""
    results: StepResults = field(default_factory=StepResults)


class StockConnector:
    """Scheduler and worker side of upstream's pull connector.

    The two sides speak through per-step lists, as in vLLM, so that what the
    scheduler decides in one step the worker learns in the next.
    """

    def __init__(
        self,
        config: EngineConfig,
        engine_id: str,
        pool: BlockPool,
        clock: EngineClock,
        metrics: EngineMetrics,
    ) -> None:
        self.config = config
        self.engine_id = engine_id
        self.pool = pool
        self.clock = clock
        self.metrics = metrics
        self.client = SideChannelClient(config, clock)
        self.side_channel_port = 0
        self.wake: Callable[[], None] = lambda: None
        self.worker = _WorkerState()
        self.need_recv: list[Load] = []
        self.need_send: dict[str, float] = {}
        self.batched: set[str] = set()
        self.not_processed: set[str] = set()
        self._heartbeats: dict[str, Mapping[str, Any]] = {}
        self._last_heartbeat_s = float("-inf")
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def ttl_s(self) -> float:
        """How long decode keeps a finished turn's blocks, in seconds."""
        return self.config.decoder_kv_blocks_ttl_s

    async def close(self) -> None:
        """Stop every transfer where it is."""
        tasks = [*self._tasks, *self.worker.handshakes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()

    # ---- scheduler side ------------------------------------------------------

    def on_new_request(self, request: EngineRequest) -> None:
        """Remember whose blocks on prefill must be kept alive while this waits."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill") and _names_remote(params):
            self._heartbeats[request.request_id] = dict(params)

    def match(self, request: EngineRequest, computed_tokens: int) -> tuple[int, bool]:
        """Offer what the params say the remote has, by its length alone."""
        params = request.kv_transfer_params
        if not params:
            return 0, False
        if params.get("do_remote_prefill"):
            count = request.num_prompt_tokens - computed_tokens
            if count > 0:
                return count, True
        if params.get("do_remote_decode") and _names_remote(params):
            remote = params.get("remote_num_tokens") or 0
            count = min(remote, request.num_prompt_tokens) - computed_tokens
            if count > 0 and count >= self.config.kv_recompute_threshold_tokens:
                return count, True
        return 0, False

    def allocated(self, request: EngineRequest, external_tokens: int) -> None:
        """Queue the load, once for each request."""
        params = request.kv_transfer_params
        if not params:
            return
        backwards = params.get("do_remote_decode") and self.config.bidirectional
        if params.get("do_remote_decode") or (
            params.get("do_remote_prefill") and self.config.bidirectional
        ):
            self.batched.add(request.request_id)
        if not (
            params.get("do_remote_prefill")
            or (backwards and not params.get("_remote_blocks_processed"))
        ):
            return
        if params.get("remote_block_ids"):
            if _names_remote(params):
                local = request.block_ids[request.local_hit_blocks :] if external_tokens else ()
                self.need_recv.append(
                    Load(
                        request.request_id, dict(params), tuple(local), awaited=external_tokens > 0
                    )
                )
        else:
            assert external_tokens == 0
        params["do_remote_prefill"] = False
        params["_remote_blocks_processed"] = True

    def finished(self, request: EngineRequest) -> tuple[bool, dict[str, Any] | None]:
        """Pin what finished normally; tell prefill to free what never started."""
        params = request.kv_transfer_params
        self._heartbeats.pop(request.request_id, None)
        if not params:
            return False, None
        if params.get("do_remote_prefill"):
            self.need_recv.append(Load(request.request_id, dict(params), (), awaited=False))
            params["do_remote_prefill"] = False
            return False, None
        as_prefill = bool(params.get("do_remote_decode"))
        if not as_prefill and not self.config.bidirectional:
            return False, None
        if request.status not in (Status.FINISHED_STOPPED, Status.FINISHED_LENGTH_CAPPED):
            self.not_processed.add(request.request_id)
            return False, None
        return self.pin(request, as_prefill=as_prefill)

    def rejected(self, params: dict[str, Any]) -> None:
        """Tell prefill to free its blocks (vLLM 0.32 does; 0.31 and older left them pinned)."""
        if _names_remote(params):
            self.need_recv.append(Load("rejected", dict(params), (), awaited=False))

    def pin(
        self, request: EngineRequest, *, as_prefill: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep a finished request's blocks, and say how to read them."""
        keep_s = self.config.kv_lease_duration_s if as_prefill else self.ttl_s
        deadline_s = self.clock.now_s() + keep_s
        self.need_send[request.request_id] = deadline_s
        used = -(-request.num_computed_tokens // self.config.block_size_tokens)
        return True, {
            "do_remote_prefill": as_prefill,
            "do_remote_decode": not as_prefill,
            "remote_block_ids": [request.block_ids[:used]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self.config.host,
            "remote_port": self.side_channel_port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": request.num_computed_tokens,
            "remote_blocks_expiry_time": None if as_prefill else deadline_s,
            "transfer_mode": "pull",
        }

    def update_output(self, results: StepResults) -> None:
        """A received prompt needs no more heartbeats."""
        for request_id in results.finished_recving:
            self._heartbeats.pop(request_id, None)

    def has_work(self) -> bool:
        """Whether something still has to reach the worker or a peer."""
        return bool(self.need_recv or self._tasks)

    # ---- worker side ---------------------------------------------------------

    def start_loads(self) -> None:
        """Hand the step's lists to the worker side."""
        loads, self.need_recv = self.need_recv, []
        for load in loads:
            self._spawn(self._run_load(load))
        worker = self.worker
        worker.in_batch |= self.batched
        self.batched = set()
        for request_id in self.not_processed:
            worker.in_batch.discard(request_id)
            assert request_id not in worker.pinned_until_s
        self.not_processed = set()
        for request_id, deadline_s in self.need_send.items():
            # One that was read before its deadline arrived is in the batch no more.
            if request_id in worker.in_batch:
                worker.pinned_until_s[request_id] = deadline_s
        self.need_send = {}
        self._send_heartbeats()

    def collect(self) -> StepResults:
        """Notified, expired, loaded and failed requests since the last step."""
        worker = self.worker
        results, worker.results = worker.results, StepResults()
        results.finished_sending |= self.take_notifications()
        results.finished_sending |= self.take_expired()
        return results

    def take_notifications(self) -> set[str]:
        """Requests whose blocks a reader is done with."""
        worker = self.worker
        messages, worker.notifications = worker.notifications, []
        done: set[str] = set()
        for message in messages:
            if message.startswith("HB:"):
                extended_s = self.clock.now_s() + self.config.kv_lease_duration_s
                for request_id in message[3:].split(","):
                    if request_id in worker.pinned_until_s:
                        worker.pinned_until_s[request_id] = max(
                            worker.pinned_until_s[request_id], extended_s
                        )
                continue
            request_id = message.rpartition(":")[0]
            if request_id not in worker.pinned_until_s and request_id not in worker.in_batch:
                self.metrics.notification_after_expiry()
                continue
            done.add(request_id)
            worker.in_batch.remove(request_id)
            worker.pinned_until_s.pop(request_id, None)
        return done

    def take_expired(self) -> set[str]:
        """Requests whose deadline has passed."""
        worker = self.worker
        now_s = self.clock.now_s()
        expired = {r for r, deadline_s in worker.pinned_until_s.items() if now_s >= deadline_s}
        for request_id in expired:
            self.metrics.kv_expired()
            worker.in_batch.remove(request_id)
            del worker.pinned_until_s[request_id]
        return expired

    def notified(self, message: str) -> None:
        """The side channel received a message."""
        self.worker.notifications.append(message)
        self.wake()

    async def _run_load(self, load: Load) -> None:
        try:
            await self._read(load)
        except TransferError:
            if load.awaited:
                self.worker.results.failed_recving.add(load.request_id)
        except Exception as error:  # noqa: BLE001
            # In vLLM this is raised in the worker's step and kills the engine.
            self.worker.results.error = error
        if load.awaited:
            self.worker.results.finished_recving.add(load.request_id)
        self.wake()

    async def _read(self, load: Load) -> None:
        params = load.params
        peer = await self._peer(params)
        if load.local_blocks and self._is_expiring(params, peer):
            self.metrics.kv_expired()
            raise TransferError("the blocks expire too soon")
        done = f"{params['remote_request_id']}:1"
        if not load.local_blocks:
            await self._notify(peer, done)
            return
        remote = list(params["remote_block_ids"][0])
        count = len(load.local_blocks)
        if count > len(remote):
            msg = f"{count} local blocks, {len(remote)} remote ones"
            raise AssertionError(msg)
        # By suffix: what is missing here is taken to be the end of what is there.
        try:
            data = await self.client.read(peer, remote[-count:])
        except TransferError:
            self.metrics.transfer_failed()
            raise
        self.pool.write_raw(load.local_blocks, data)
        self.metrics.transferred(len(data))
        await self._notify(peer, done)

    async def _peer(self, params: Mapping[str, Any]) -> Peer:
        engine_id = params["remote_engine_id"]
        peer = self.worker.peers.get(engine_id)
        if peer is None:
            task = self.worker.handshakes.get(engine_id)
            if task is None:
                task = asyncio.create_task(self._handshake(params))
                self.worker.handshakes[engine_id] = task
            peer = await asyncio.shield(task)
        return peer

    async def _handshake(self, params: Mapping[str, Any]) -> Peer:
        engine_id = params["remote_engine_id"]
        try:
            peer = await self.client.handshake(
                params["remote_host"], params["remote_port"], engine_id
            )
        except TransferError:
            self.metrics.transfer_failed()
            raise
        finally:
            del self.worker.handshakes[engine_id]
        self.worker.peers[engine_id] = peer
        return peer

    def _is_expiring(self, params: Mapping[str, Any], peer: Peer) -> bool:
        expiry_s = params.get("remote_blocks_expiry_time")
        if expiry_s is None or not self.config.bidirectional:
            # Absent means an unchecked read.
            return False
        deadline_s = float(expiry_s) - peer.clock_offset_s
        return self.clock.now_s() + EXPIRY_MARGIN_S >= deadline_s

    async def _notify(self, peer: Peer, message: str) -> None:
        try:
            await self.client.notify(peer, message)
        except TransferError:
            self.metrics.notification_failed()

    def _send_heartbeats(self) -> None:
        now_s = self.clock.now_s()
        if not self._heartbeats:
            return
        if now_s - self._last_heartbeat_s < self.config.kv_lease_duration_s // 6:
            return
        self._last_heartbeat_s = now_s
        for params in self._heartbeats.values():
            self._spawn(self._heartbeat(params))

    async def _heartbeat(self, params: Mapping[str, Any]) -> None:
        try:
            peer = await self._peer(params)
        except TransferError:
            return
        await self._notify(peer, f"HB:{params['remote_request_id']}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _names_remote(params: Mapping[str, Any]) -> bool:
    return bool(params.get("remote_block_ids")) and all(key in params for key in REMOTE_KEYS)
