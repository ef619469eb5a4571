"""The demo's checks: reports that the engine's counters do not bear out are told."""

from __future__ import annotations

from typing import Any

import pytest

from kvtide.local.metrics import BYTES_READ, TOKENS_COMPUTED, TOKENS_READ
from kvtide.local.turns import (
    KvGeometry,
    TurnOutcome,
    check_outcome,
    reuse_problem,
    settled_problems,
)

GEOMETRY = KvGeometry(bytes_per_token=46_080, block_size_tokens=128)
BEFORE = {BYTES_READ: 1_000_000.0, TOKENS_READ: 500.0, TOKENS_COMPUTED: 3_000.0}


def outcome(pulled: int, recomputed: int, reuse: str = "pulled") -> TurnOutcome:
    report: dict[str, Any] = {
        "pulled_tokens": pulled,
        "recomputed_tokens": recomputed,
        "reuse": reuse,
    }
    return TurnOutcome(answer="yes", ttft_s=0.5, report=report)


def counters(pulled: int, computed: int, blocks: int) -> dict[str, float]:
    return {
        BYTES_READ: BEFORE[BYTES_READ] + blocks * 128 * 46_080,
        TOKENS_READ: BEFORE[TOKENS_READ] + pulled,
        TOKENS_COMPUTED: BEFORE[TOKENS_COMPUTED] + computed,
    }


@pytest.mark.parametrize(("pulled", "blocks"), [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2)])
def test_report_that_agrees_with_the_counters_is_fine(pulled: int, blocks: int) -> None:
    """Tokens are counted exactly, bytes in the whole blocks that they lie in."""
    after = counters(pulled, 200, blocks)
    assert check_outcome(outcome(pulled, 200), BEFORE, after, GEOMETRY) == []


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (counters(1340, 217, 10), "bytes pulled"),
        (
            counters(1339, 217, 11),
            "tokens pulled: kvtide's report means 1,340, the prefill engine counted 1,339",
        ),
        (counters(1340, 218, 11), "tokens recomputed"),
    ],
)
def test_report_that_disagrees_is_told(after: dict[str, float], told: str) -> None:
    """One missing block or one token too many is a problem that names both figures."""
    problems = check_outcome(outcome(1340, 217), BEFORE, after, GEOMETRY)
    assert len(problems) == 1
    assert told in problems[0]


def test_missing_counter_is_told() -> None:
    """An engine that does not count proves nothing: that is a problem too."""
    after = counters(1340, 217, 11)
    del after[BYTES_READ]
    assert check_outcome(outcome(1340, 217), BEFORE, after, GEOMETRY) == [
        f"the prefill engine does not count {BYTES_READ}"
    ]


def test_counters_may_come_late() -> None:
    """The counters are read again until they have settled."""
    readings = iter([BEFORE, counters(1340, 217, 0), counters(1340, 217, 11)])
    assert settled_problems(outcome(1340, 217), BEFORE, lambda: next(readings), GEOMETRY) == []
    assert next(readings, None) is None


def test_turn_that_should_have_pulled_says_why_it_did_not() -> None:
    """Silent recomputing is a failure of the demo, and the reason is shown."""
    nothing = outcome(0, 1557, reuse="history_changed")
    assert "history_changed" in reuse_problem(2, nothing, readback=True)
    assert reuse_problem(1, nothing, readback=True) == ""
    assert reuse_problem(2, nothing, readback=False) == ""


def test_turn_that_should_not_have_pulled_is_told() -> None:
    """Readback off means off, and a first turn has nothing to read."""
    pulled = outcome(1340, 217)
    assert "though nothing should" in reuse_problem(2, pulled, readback=False)
    assert "though nothing should" in reuse_problem(1, pulled, readback=True)
    assert reuse_problem(2, pulled, readback=True) == ""
