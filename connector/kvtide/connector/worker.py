"""Worker side of the connector: frees what was released, and says why each pin ended.

Runs in every vLLM worker, inside the step. Every private vLLM attribute that it
touches is listed in ``vllm_surface``.
"""

from __future__ import annotations

import gc
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.logger import init_logger

from kvtide.connector.pins import EndCause

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorTransferResults,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)


class LeaseMetadata(NixlConnectorMetadata):  # type: ignore[misc]
    """vLLM's metadata for one step, plus the pins to release in it."""

    def __init__(self) -> None:
        super().__init__()
        self.releases: set[str] = set()

    @classmethod
    def extend(cls, meta: KVConnectorMetadata, releases: set[str]) -> LeaseMetadata:
        """Take over everything of ``meta``, whatever fields this vLLM gives it."""
        extended = cls()
        extended.__dict__.update(meta.__dict__)
        extended.releases = releases
        return extended


@dataclass
class LeaseWorkerMeta(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Pins that ended on a worker in one step, and why."""

    ended: dict[str, EndCause] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge two workers' reports; a read by anyone outranks the other causes."""
        if not isinstance(other, LeaseWorkerMeta):
            msg = f"workers of one engine must run one connector, got {type(other).__name__}"
            raise TypeError(msg)
        merged = dict(self.ended)
        for request_id, cause in other.ended.items():
            if merged.get(request_id) is not EndCause.READ:
                merged[request_id] = cause
        return LeaseWorkerMeta(merged)


@contextmanager
def _nixl_progress_thread(*, enabled: bool) -> Iterator[None]:
    """Build the NIXL agent without its progress thread, if so configured.

    Over UCX's tcp and shm transports that thread spins: it takes a whole core
    from an engine that has one, and starves whoever shares it. Without it NIXL
    progresses in the steps, and an engine that pins anything keeps stepping;
    a peer's read may wait for a long step to end. Leave it on for RDMA.
    """
    original = base_worker.nixl_agent_config
    if not enabled and original is not None:
        base_worker.nixl_agent_config = partial(original, enable_prog_thread=False)
    try:
        yield
    finally:
        base_worker.nixl_agent_config = original


@contextmanager
def _same_cpu_affinity() -> Iterator[None]:
    """Leave this thread on the cores that it was bound to.

    On CPU, upstream's worker moves its main thread to the last core of the node,
    "for start_load_kv"; but that thread computes, too. Two engines bound to a
    core each then share one, and the one that idles (it spins) starves the other.
    """
    if not hasattr(os, "sched_getaffinity"):  # macOS
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _stop_busy_waiting() -> None:
    """Let this process sleep between steps instead of spinning for a second after each.

    An engine that pins anything steps for ever, so on CPU its worker spins for
    ever, and whatever the kernel places on that core gets no time. The queue's
    reader falls asleep by itself after ``busy_loop_s``; this makes that 0.
    """
    for candidate in gc.get_objects():
        if type(candidate) is SpinCondition and candidate.is_reader:
            candidate.busy_loop_s = 0


class LeasedNixlWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """vLLM's pull worker that can also let a pin go before its deadline.

    Each worker reports each request finished exactly once, however its pin
    ends: vLLM's scheduler dies on a second report.
    """

    def __init__(
        self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig
    ) -> None:
        extra = vllm_config.kv_transfer_config.get_from_extra_config
        if not extra("kvtide_worker_busy_wait", default=True):
            _stop_busy_waiting()
        enabled = bool(extra("kvtide_nixl_progress_thread", default=True))
        with _same_cpu_affinity(), _nixl_progress_thread(enabled=enabled):
            super().__init__(vllm_config, engine_id, kv_cache_config)
        self._ended: dict[str, EndCause] = {}
        self._released: set[str] = set()

    def start_load_kv(self, metadata: NixlConnectorMetadata) -> None:
        """Start this step's reads, then drop the pins that the registry released.

        In that order: a pin may arrive and be released in the same metadata.
        """
        super().start_load_kv(metadata)
        for request_id in getattr(metadata, "releases", ()):
            # Only a pin that is still here: one that was read or that ran out
            # has been, or will be, reported by that.
            if self._reqs_to_send.pop(request_id, None) is None:
                continue
            self._reqs_to_process.discard(request_id)
            self.consumer_notification_counts_by_req.pop(request_id, None)
            self.expected_consumer_notifications_by_req.pop(request_id, None)
            self._released.add(request_id)
            self._ended[request_id] = EndCause.RELEASED

    def get_transfer_results(self) -> KVConnectorTransferResults:
        """Add the released pins to those that finished sending."""
        results = super().get_transfer_results()
        results.finished_sending.update(self._released)
        self._released.clear()
        return results

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        """Fail every read that ended after its owner's deadline: the blocks may be another's.

        Upstream checks the deadline when it starts a read and trusts whatever
        arrives, however late.
        """
        done, failed = super()._pop_done_transfers(transfers)
        for request_id in done - failed:
            meta = self._recving_metadata.get(request_id)
            if meta is None or meta.remote is None or meta.remote.blocks_expiry_time is None:
                continue
            offset_s = self._engine_clock_offset.get(meta.remote.engine_id)
            if offset_s is None or time.perf_counter() >= meta.remote.blocks_expiry_time - offset_s:
                logger.warning(
                    "kvtide: request %s: the read from engine %s ended after its deadline; "
                    "recomputing",
                    request_id,
                    meta.remote.engine_id,
                )
                self.xfer_stats.record_kv_expired_req()
                failed.add(request_id)
        return done, failed

    def _get_new_notifs(self) -> set[str]:
        read: set[str] = super()._get_new_notifs()
        self._ended.update(dict.fromkeys(read, EndCause.READ))
        return read

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        before = set(done_sending)
        super()._reap_expired_send_leases(done_sending)
        self._ended.update(dict.fromkeys(done_sending - before, EndCause.EXPIRED))

    def build_connector_worker_meta(self) -> LeaseWorkerMeta | None:
        """What ended since the last step; None when nothing did."""
        if not self._ended:
            return None
        meta = LeaseWorkerMeta(self._ended)
        self._ended = {}
        return meta
