"""Metrics: what engines count is read as they name it."""

from __future__ import annotations

import http.server
import threading

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from kvtide.local.metrics import (
    BYTES_READ,
    TOKENS_COMPUTED,
    TOKENS_READ,
    UNSAFE_READS,
    parse_metrics,
    read_metrics,
)


def exposition() -> str:
    """What a vLLM engine with two ranks exposes, made by the library that vLLM uses."""
    registry = CollectorRegistry()
    moved = Histogram(
        "vllm:nixl_bytes_transferred", "x", ["engine"], registry=registry, buckets=[1024, 4096]
    )
    unsafe = Counter("vllm:nixl_num_notifications_after_expiry", "x", ["engine"], registry=registry)
    tokens = Counter("vllm:prompt_tokens_by_source", "x", ["engine", "source"], registry=registry)
    for engine in ("0", "1"):
        moved.labels(engine).observe(1000)
        moved.labels(engine).observe(3000)
        unsafe.labels(engine).inc(0)
        tokens.labels(engine, "external_kv_transfer").inc(100)
        tokens.labels(engine, "local_compute").inc(28)
    return generate_latest(registry).decode()


def test_samples_are_summed_over_engines() -> None:
    """Counters and histogram sums of all ranks are added up, by the names that the demo uses."""
    values = parse_metrics(exposition())
    assert values[BYTES_READ] == 8000
    assert values["vllm:nixl_bytes_transferred_count"] == 4
    assert values[TOKENS_READ] == 200
    assert values[TOKENS_COMPUTED] == 56
    assert values["vllm:prompt_tokens_by_source_total"] == 256


def test_zero_is_not_absent() -> None:
    """A counter that has not moved is there as 0; one that does not exist is not."""
    values = parse_metrics(exposition())
    assert values[UNSAFE_READS] == 0
    assert "vllm:no_such_counter_total" not in values


def test_buckets_and_creation_times_are_left_out() -> None:
    """What makes no sense as a sum is not offered."""
    assert not [
        name for name in parse_metrics(exposition()) if name.endswith(("_bucket", "_created"))
    ]


@pytest.fixture
def metrics_url():
    body = exposition().encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_metrics_are_read_over_http(metrics_url: str) -> None:
    """The endpoint is asked where Prometheus would ask it."""
    assert read_metrics(metrics_url)[BYTES_READ] == 8000


def test_server_that_is_gone_is_an_os_error(metrics_url: str) -> None:
    """Whoever asks a dead engine gets an OSError, not something of a library's own."""
    with pytest.raises(OSError, match="refused"):
        read_metrics("http://127.0.0.1:9")
