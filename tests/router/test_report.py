from __future__ import annotations

import json
from dataclasses import fields

import pytest

from kvtide.router.metrics import RouterMetrics
from kvtide.router.report import (
    Outcome,
    Reuse,
    TurnHistory,
    TurnRecord,
    TurnReport,
    report_header,
)
from kvtide.v1 import router_pb2


def record(reuse: str = "pulled", **fields) -> TurnRecord:
    report = TurnReport(turn_id="t", reuse=reuse, **fields)
    return TurnRecord(report, Outcome.COMPLETED, "stop", 3, 1.5, 2.5)


def test_the_report_has_the_fields_of_the_proto():
    """HTTP and gRPC clients read the same names, in the same order."""
    names = [field.name for field in router_pb2.TurnReport.DESCRIPTOR.fields]
    assert [field.name for field in fields(TurnReport)] == names
    message = router_pb2.TurnReport(**TurnReport("t", reuse=Reuse.NO_SESSION).as_json())
    assert message.reuse == "no_session"


def test_the_header_is_compact_ascii_json():
    """Whatever an engine calls itself, it can't break or forge a header."""
    value = report_header(TurnReport("t", decode_node_id="d\r\nX-Evil: 1\u20ac"))
    assert value.isascii()
    assert "\n" not in value
    assert "\r" not in value
    assert ": " not in value.replace("X-Evil: 1", "")
    assert json.loads(value)["decode_node_id"] == "d\r\nX-Evil: 1\u20ac"


def test_the_history_forgets_the_oldest():
    """It keeps as many turns as it was told to."""
    history = TurnHistory(2)
    for prompt_tokens in (1, 2, 3):
        history.add(record(prompt_tokens=prompt_tokens))
    assert [r.report.prompt_tokens for r in history.records()] == [2, 3]


def test_a_record_is_flat_json():
    """The listing shows the report's fields and how the turn ended, side by side."""
    flat = record(pulled_tokens=7).as_json()
    assert flat["pulled_tokens"] == 7
    assert flat["status"] == "completed"
    assert flat["ttft_ms"] == 1.5
    json.dumps(flat)


@pytest.mark.parametrize(
    ("reuse", "label"),
    [
        ("pulled", "pulled"),
        ("no_lease", "no_lease"),
        ("prefill_failed", "prefill_failed"),
        ("expired", "expired"),
        ("", "none"),
        ("surprise-17", "other"),
    ],
)
def test_unknown_reasons_share_one_label(reuse, label):
    """A broken engine can't make a time series out of every turn."""
    metrics = RouterMetrics()
    metrics.turn_started()
    metrics.turn_ended("/v1/completions", record(reuse))
    assert f'reuse="{label}"'.encode() in metrics.exposition()


def test_tokens_are_counted_by_source():
    """Tokens that were really pulled have a counter of their own, to alarm on."""
    metrics = RouterMetrics()
    metrics.turn_started()
    metrics.turn_ended("/x", record(pulled_tokens=7, cached_tokens=2, recomputed_tokens=1))
    text = metrics.exposition().decode()
    assert 'kvtide_router_prompt_tokens_total{source="pulled"} 7.0' in text
    assert 'kvtide_router_prompt_tokens_total{source="cached"} 2.0' in text
    assert 'kvtide_router_prompt_tokens_total{source="recomputed"} 1.0' in text
