"""The engine's Prometheus metrics, under vLLM's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from tests.fakes.engine.blocks import PoolState

_LABELS = ("model_name", "engine")


class EngineMetrics:
    """Counters of one engine start; a restart begins at 0, as a new process does."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._values = (model, "0")
        self._kv_expired = self._counter("nixl_num_kv_expired_reqs", "Requests whose KV expired")
        self._after_expiry = self._counter(
            "nixl_num_notifications_after_expiry", "Reads of blocks that were no longer pinned"
        )
        self._failed_transfers = self._counter("nixl_num_failed_transfers", "Failed transfers")
        self._failed_notifications = self._counter(
            "nixl_num_failed_notifications", "Failed notifications"
        )
        self._bytes = Histogram(
            "vllm:nixl_bytes_transferred",
            "Bytes of each transfer",
            _LABELS,
            buckets=[2 ** (10 + i) for i in range(1, 25, 2)],
            registry=self.registry,
        )
        self._bytes.labels(*self._values)
        self._preemptions = self._counter("num_preemptions", "Preempted requests")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed")
        self._generated = self._counter("generation_tokens", "Tokens generated")
        self._running = self._gauge("num_requests_running", "Requests in a batch")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait")
        self._usage = self._gauge("kv_cache_usage_perc", "KV cache usage, 1 = full")

    def kv_expired(self) -> None:
        """A pin ran out, or a read was declined because it was about to."""
        self._kv_expired.labels(*self._values).inc()

    def notification_after_expiry(self) -> None:
        """Somebody read blocks that were no longer theirs to read."""
        self._after_expiry.labels(*self._values).inc()

    def transfer_failed(self) -> None:
        """A handshake or READ failed."""
        self._failed_transfers.labels(*self._values).inc()

    def notification_failed(self) -> None:
        """A notification could not be delivered."""
        self._failed_notifications.labels(*self._values).inc()
        self._failed_transfers.labels(*self._values).inc()

    def transferred(self, byte_count: int) -> None:
        """A READ finished."""
        self._bytes.labels(*self._values).observe(byte_count)

    def preempted(self) -> None:
        """A running request lost its blocks."""
        self._preemptions.labels(*self._values).inc()

    def answered(self, prompt_tokens: int, generated_tokens: int) -> None:
        """A request finished."""
        self._prompt_tokens.labels(*self._values).inc(prompt_tokens)
        self._generated.labels(*self._values).inc(generated_tokens)

    def value(self, name: str) -> float:
        """A sample by its exposition name, such as ``vllm:nixl_bytes_transferred_sum``."""
        labels = dict(zip(_LABELS, self._values, strict=True))
        found = self.registry.get_sample_value(name, labels)
        assert found is not None, f"no metric {name}"
        return found

    def expose(self, pool: PoolState) -> bytes:
        """The text that ``GET /metrics`` answers."""
        self._running.labels(*self._values).set(pool.running_requests)
        self._waiting.labels(*self._values).set(pool.waiting_requests)
        used = 1 - pool.free_blocks / pool.total_blocks
        self._usage.labels(*self._values).set(used)
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"vllm:{name}", text, _LABELS, registry=self.registry)
        counter.labels(*self._values)
        return counter

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge = Gauge(f"vllm:{name}", text, _LABELS, registry=self.registry)
        gauge.labels(*self._values)
        return gauge
