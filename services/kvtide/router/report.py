"""What became of a turn: the report that clients see, and the record that is kept."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

import orjson

__all__ = ["Outcome", "Reuse", "TurnHistory", "TurnRecord", "TurnReport", "report_header"]


class Reuse(StrEnum):
    """The router's own reasons why nothing was pulled; docs/turn-report.md has all of them."""

    NO_SESSION = "no_session"
    """The request names no conversation."""
    READBACK_OFF = "readback_off"
    """Switched off, by the client for this request or in the settings."""
    NOT_DISAGGREGATED = "not_disaggregated"
    """The request can only be served by one engine alone."""
    REGISTRY_UNAVAILABLE = "registry_unavailable"
    """The block-lease registry gave no answer in time."""
    PREFILL_FAILED = "prefill_failed"
    """The prefill leg failed while it had a lease; another one was run without."""
    UNREPORTED = "unreported"
    """The prefill engine does not say: it runs without kvtide's connector."""


class Outcome(StrEnum):
    """How a turn ended."""

    COMPLETED = "completed"
    """The decode engine finished the answer, whether or not the client stayed to read it."""
    REFUSED = "refused"
    """An engine refused the request, and its answer was passed on."""
    REJECTED = "rejected"
    """The router itself refused it: no ready engine, or draining."""
    FAILED = "failed"
    """An engine failed."""
    ABORTED = "aborted"
    """The client left before the answer was finished."""


@dataclass(frozen=True, slots=True)
class TurnReport:
    """What became of the prompt of one turn. Fields as in `kvtide.v1.TurnReport`."""

    turn_id: str
    prefill_node_id: str = ""
    decode_node_id: str = ""
    prompt_tokens: int = 0
    pulled_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    reuse: str = ""
    decoder_kv_blocks_ttl_ms: int = 0
    kv_recompute_threshold_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        """The fields by name."""
        # A third of the time of dataclasses.asdict, which copies deeply; this runs every turn.
        return {name: getattr(self, name) for name in _REPORT_FIELDS}


_REPORT_FIELDS = tuple(field.name for field in fields(TurnReport))


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One finished turn. Carries no name of a tenant or conversation: every client may read it."""

    report: TurnReport
    outcome: Outcome
    finish_reason: str
    completion_tokens: int
    ttft_ms: float | None
    """Until the first byte of the answer; None when there was none."""
    total_ms: float

    def as_json(self) -> dict[str, Any]:
        """A flat object: the report's fields, then the record's own."""
        return {
            **self.report.as_json(),
            "status": self.outcome.value,
            "finish_reason": self.finish_reason,
            "completion_tokens": self.completion_tokens,
            "ttft_ms": self.ttft_ms,
            "total_ms": self.total_ms,
        }


class TurnHistory:
    """The last turns, oldest first; older ones fall out."""

    def __init__(self, size: int) -> None:
        self._records: deque[TurnRecord] = deque(maxlen=size)

    def add(self, record: TurnRecord) -> None:
        """Keep a finished turn."""
        self._records.append(record)

    def records(self) -> list[TurnRecord]:
        """Every turn that is kept, oldest first."""
        return list(self._records)


def report_header(report: TurnReport) -> str:
    """The report as the value of the X-Kvtide-Turn header: compact JSON in ASCII."""
    value = orjson.dumps(report.as_json()).decode()
    # Node ids may be in any script; header values may not.
    return value if value.isascii() else json.dumps(report.as_json(), separators=(",", ":"))
