"""The router's Prometheus metrics. Each router has a registry of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvtide.connector import readback
from kvtide.registry.ports import MissReason
from kvtide.router.report import Reuse

if TYPE_CHECKING:
    from kvtide.router.report import TurnRecord

__all__ = ["RouterMetrics"]

# Engines name some of the reasons. Only names known here become label values, so that a broken
# engine can't make a time series a turn.
_KNOWN_REUSE = frozenset(
    {
        *(str(reason) for reason in Reuse),
        *(str(reason) for reason in MissReason),
        readback.REUSE_BELOW_THRESHOLD,
        readback.REUSE_BLOCK_SIZE_MISMATCH,
        readback.REUSE_CACHED,
        readback.REUSE_HISTORY_CHANGED,
        readback.REUSE_NO_HANDLE,
        readback.REUSE_PULLED,
        readback.REUSE_TRANSFER_FAILED,
        readback.REUSE_UNSUPPORTED_CACHE,
        readback.REUSE_UNVERIFIED,
        "expired",
    }
)
_TTFT_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 50, 100)


class RouterMetrics:
    """Counts turns, tokens and failed legs, and times first bytes."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self._turns = Counter(
            "kvtide_router_turns",
            "Turns that ended, by how, and by what became of their prompt.",
            ["path", "status", "reuse"],
            registry=registry,
        )
        self._tokens = Counter(
            "kvtide_router_prompt_tokens",
            "Prompt tokens, by where their KV came from, as the prefill engines count them.",
            ["source"],
            registry=registry,
        )
        self._ttft = Histogram(
            "kvtide_router_ttft_seconds",
            "From the request to the first byte of the answer.",
            ["reuse"],
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self._leg_errors = Counter(
            "kvtide_router_leg_errors",
            "Legs that an engine did not serve, by what went wrong.",
            ["leg", "kind"],
            registry=registry,
        )
        self._running = Gauge(
            "kvtide_router_turns_running", "Turns in progress.", registry=registry
        )

    def turn_started(self) -> None:
        """Count a turn in."""
        self._running.inc()

    def turn_ended(self, path: str, record: TurnRecord) -> None:
        """Count a turn out."""
        report = record.report
        reuse = report.reuse or "none"
        if reuse != "none" and reuse not in _KNOWN_REUSE:
            reuse = "other"
        self._running.dec()
        self._turns.labels(path, record.outcome.value, reuse).inc()
        self._tokens.labels("pulled").inc(report.pulled_tokens)
        self._tokens.labels("cached").inc(report.cached_tokens)
        self._tokens.labels("recomputed").inc(report.recomputed_tokens)
        if record.ttft_ms is not None:
            self._ttft.labels(reuse).observe(record.ttft_ms / 1000)

    def leg_failed(self, leg: str, kind: str) -> None:
        """Count a leg that failed; `kind` as in `LegFailed`, or "status_5xx"."""
        self._leg_errors.labels(leg, kind).inc()

    def exposition(self) -> bytes:
        """Everything in the Prometheus text format."""
        return generate_latest(self._registry)
