"""The engine's agent: three threads that keep the control plane informed.

One holds the ``Attach`` stream to the registry, one the ``Report`` stream to
node health, one asks the engine's own HTTP endpoint whether it answers. None is
on the forward path, and none can stop the engine: whatever the control plane
does, the engine serves on and the agent reconnects.

No vLLM in here: the fake engine of the tests runs the same agent.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from kvtide.connector.pins import EndCause, Pin, PinEvent, PinTable
from kvtide.connector.wire import fingerprint_to_proto, handle_to_proto
from kvtide.v1 import lease_pb2, lease_pb2_grpc, node_pb2, node_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtide.connector.engine_settings import EngineSettings

logger = logging.getLogger("vllm.kvtide.agent")

_BACKOFF_FIRST_S = 0.2
_BACKOFF_LIMIT_S = 5.0
_CONNECT_TIMEOUT_S = 5.0
_PROBE_STARTING_S = 0.5
_PROBE_SERVING_S = 5.0
_HTTP_TIMEOUT_S = 2.0
_STOP_JOIN_S = 0.5
_DEFAULT_REPORT_INTERVAL_S = 1.0
_DEFAULT_INVENTORY_INTERVAL_S = 30.0

_CHANNEL_OPTIONS = (
    # Both ends must agree, or the server answers too_many_pings (FACTS of gRPC core:
    # the server tolerates one ping each 10 s without data only when told so).
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted registry is found again within this, not after two minutes; and
    # streams to one address must not share each other's back-off.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", 16 * 1024 * 1024),
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
)

_END_CAUSES = {
    EndCause.READ: lease_pb2.LEASE_END_CAUSE_READ,
    EndCause.EXPIRED: lease_pb2.LEASE_END_CAUSE_EXPIRED,
    EndCause.RELEASED: lease_pb2.LEASE_END_CAUSE_RELEASED,
}


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What the engine is, as node health shows it to routers."""

    node_id: str
    epoch: str
    is_prefill: bool
    url: str
    models: tuple[str, ...]
    vllm_version: str
    block_size_tokens: int
    block_count: int
    kv_recompute_threshold_tokens: int
    ttl_s: float
    max_model_len_tokens: int


class Load(Protocol):
    """What the engine is doing now; ``last_step_s`` is in the engine's clock."""

    free_blocks: int
    running_requests: int
    waiting_requests: int
    last_step_s: float


class EngineAgent:
    """Keeps one engine attached to the registry and reported to node health.

    ``release(request_id)`` is called for each pin that the registry wants freed;
    it must only enqueue. ``engine_now_s`` is the clock of the pins' deadlines.
    """

    def __init__(
        self,
        *,
        settings: EngineSettings,
        identity: EngineIdentity,
        pins: PinTable,
        release: Callable[[str], None],
        load: Callable[[], Load],
        engine_now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._pins = pins
        self._release = release
        self._load = load
        self._engine_now_s = engine_now_s
        self._stopping = threading.Event()
        self._http_serving = False
        self._calls: set[Any] = set()
        self._threads = [
            threading.Thread(target=target, name=f"kvtide-{name}", daemon=True)
            for name, target in (
                ("attach", lambda: self._reconnecting("registry", self._attach_once)),
                ("report", lambda: self._reconnecting("node health", self._report_once)),
                ("probe", self._probe),
            )
        ]

    def start(self) -> None:
        """Start the threads; returns at once."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End both streams and wait a moment for the threads."""
        self._stopping.set()
        self._pins.wake()
        for call in list(self._calls):
            call.cancel()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(_STOP_JOIN_S)

    # ---- connection --------------------------------------------------------

    def _reconnecting(self, peer: str, once: Callable[[], None]) -> None:
        backoff_s = _BACKOFF_FIRST_S
        failing = False
        while not self._stopping.is_set():
            started_s = time.monotonic()
            try:
                once()
            except (grpc.RpcError, grpc.FutureTimeoutError) as error:
                reason = error.code() if isinstance(error, grpc.Call) else "no connection"
                if not failing and not self._stopping.is_set():
                    logger.warning("kvtide: no stream to %s (%s); retrying", peer, reason)
                failing = True
            except Exception:
                logger.exception("kvtide: the stream to %s failed; retrying", peer)
                failing = True
            if time.monotonic() - started_s > _BACKOFF_LIMIT_S:
                backoff_s, failing = _BACKOFF_FIRST_S, False
            self._stopping.wait(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, _BACKOFF_LIMIT_S)

    # ---- registry ----------------------------------------------------------

    def _attach_once(self) -> None:
        closed = threading.Event()
        interval_s = [_DEFAULT_INVENTORY_INTERVAL_S]

        def requests() -> Iterator[lease_pb2.AttachRequest]:
            yield lease_pb2.AttachRequest(
                hello=lease_pb2.EngineHello(
                    node_id=self._identity.node_id, epoch=self._identity.epoch
                ),
                inventory=self._inventory(self._pins.open_stream()),
            )
            next_inventory_s = time.monotonic() + interval_s[0]
            while not closed.is_set() and not self._stopping.is_set():
                left_s = next_inventory_s - time.monotonic()
                if left_s > 0:
                    events = self._pins.wait_for_events(min(left_s, 1.0))
                    if events:
                        yield self._batch(events)
                    continue
                # Spread the inventories of a fleet that connected all at once.
                next_inventory_s = time.monotonic() + interval_s[0] * random.uniform(0.8, 1.2)
                events, pins = self._pins.snapshot()
                message = self._batch(events)
                message.inventory.CopyFrom(self._inventory(pins))
                yield message

        with grpc.insecure_channel(self._settings.registry, options=_CHANNEL_OPTIONS) as channel:
            grpc.channel_ready_future(channel).result(_CONNECT_TIMEOUT_S)
            call = lease_pb2_grpc.LeaseRegistryServiceStub(channel).Attach(requests())
            self._calls.add(call)
            try:
                for response in call:
                    if response.HasField("welcome"):
                        interval_s[0] = response.welcome.inventory_interval_ms / 1000
                        logger.info("kvtide: attached to registry %s", self._settings.registry)
                    for release in response.releases:
                        if not self._pins.answer_release_of_unknown(release.request_id):
                            self._release(release.request_id)
            finally:
                closed.set()
                self._pins.wake()
                self._calls.discard(call)
                call.cancel()

    def _inventory(self, pins: list[Pin]) -> lease_pb2.EngineInventory:
        return lease_pb2.EngineInventory(held=[self._grant(pin) for pin in pins])

    def _batch(self, events: list[PinEvent]) -> lease_pb2.AttachRequest:
        message = lease_pb2.AttachRequest()
        for event in events:
            if isinstance(event, Pin):
                message.grants.append(self._grant(event))
            else:
                message.ended.add(request_id=event.request_id, cause=_END_CAUSES[event.cause])
        return message

    def _grant(self, pin: Pin) -> lease_pb2.LeaseGrant:
        # The time left is taken here, as the message leaves: only durations
        # cross to another host (L2).
        left_s = max(0.0, pin.deadline_s - self._engine_now_s())
        return lease_pb2.LeaseGrant(
            conversation=lease_pb2.ConversationKey(
                tenant=pin.turn.tenant, conversation_id=pin.turn.conversation_id
            ),
            generation=pin.turn.generation,
            handle=handle_to_proto(pin.handle),
            fingerprint=fingerprint_to_proto(pin.fingerprint()),
            time_left_ms=int(left_s * 1000),
            ttl_ms=int(pin.ttl_s * 1000),
        )

    # ---- node health -------------------------------------------------------

    def _report_once(self) -> None:
        closed = threading.Event()
        interval_s = [_DEFAULT_REPORT_INTERVAL_S]

        def requests() -> Iterator[node_pb2.ReportRequest]:
            message = self._report()
            message.info.CopyFrom(self._node_info())
            yield message
            while not closed.wait(interval_s[0] * random.uniform(0.9, 1.1)):
                yield self._report()

        with grpc.insecure_channel(self._settings.health, options=_CHANNEL_OPTIONS) as channel:
            grpc.channel_ready_future(channel).result(_CONNECT_TIMEOUT_S)
            call = node_pb2_grpc.NodeHealthServiceStub(channel).Report(requests())
            self._calls.add(call)
            try:
                for response in call:
                    if response.report_interval_ms:
                        interval_s[0] = response.report_interval_ms / 1000
            finally:
                closed.set()
                self._calls.discard(call)
                call.cancel()

    def _report(self) -> node_pb2.ReportRequest:
        load = self._load()
        age_s = max(0.0, self._engine_now_s() - load.last_step_s)
        return node_pb2.ReportRequest(
            load=node_pb2.NodeLoad(
                free_blocks=load.free_blocks,
                pinned_blocks=self._pins.pinned_blocks,
                running_requests=load.running_requests,
                waiting_requests=load.waiting_requests,
                last_step_age_ms=int(age_s * 1000),
            ),
            http_serving=self._http_serving,
        )

    def _node_info(self) -> node_pb2.NodeInfo:
        identity = self._identity
        role = node_pb2.NODE_ROLE_PREFILL if identity.is_prefill else node_pb2.NODE_ROLE_DECODE
        return node_pb2.NodeInfo(
            node_id=identity.node_id,
            epoch=identity.epoch,
            role=role,
            engine_url=identity.url,
            models=identity.models,
            vllm_version=identity.vllm_version,
            block_size_tokens=identity.block_size_tokens,
            block_count=identity.block_count,
            kv_recompute_threshold_tokens=identity.kv_recompute_threshold_tokens,
            decoder_kv_blocks_ttl_ms=int(identity.ttl_s * 1000),
            max_model_len_tokens=identity.max_model_len_tokens,
        )

    def _probe(self) -> None:
        """Ask the engine's own endpoint: vLLM's core is up long before its HTTP server."""
        while not self._stopping.is_set():
            serving = False
            with (
                suppress(OSError, ValueError),
                urllib.request.urlopen(
                    f"{self._identity.url}/health", timeout=_HTTP_TIMEOUT_S
                ) as answer,
            ):
                serving = answer.status == 200
            self._http_serving = serving
            self._stopping.wait(_PROBE_SERVING_S if serving else _PROBE_STARTING_S)
