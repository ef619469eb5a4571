"""The demo's results: table, JSON and chart say what was measured."""

from __future__ import annotations

import io
import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from kvtide.local.chart import write_chart
from kvtide.local.results import (
    DemoResult,
    EngineVersions,
    TurnResult,
    different_answers,
    first_words,
    results_table,
)

if TYPE_CHECKING:
    from pathlib import Path

FIRST = TurnResult(
    turn=1,
    prompt_tokens=1324,
    pulled_tokens=0,
    recomputed_tokens=1324,
    ttft_off_s=5.1234,
    ttft_on_s=5.2,
    answer_off="The order 7315 is still open.",
    answer_on="The order 7315 is still open.",
)
SECOND = TurnResult(
    turn=2,
    prompt_tokens=1557,
    pulled_tokens=1340,
    recomputed_tokens=217,
    ttft_off_s=6.4,
    ttft_on_s=0.8,
    answer_off="It will be delivered to the city of Bergen, Norway.",
    answer_on="It will be delivered to the city of Bergen, Norway.",
)


@pytest.fixture
def result() -> DemoResult:
    return DemoResult("a-model", EngineVersions("0.32.0", "1.5.1"), [FIRST, SECOND], unsafe_reads=0)


def test_json_has_exactly_the_promised_keys(result: DemoResult, tmp_path: Path) -> None:
    """demo.json is a contract with whoever reads it: these keys, and no others."""
    path = tmp_path / "build" / "demo.json"
    result.write(path)
    written = json.loads(path.read_text())
    assert list(written) == ["model", "engines", "turns", "unsafe_reads"]
    assert written["engines"] == {"vllm": "0.32.0", "nixl": "1.5.1"}
    assert written["unsafe_reads"] == 0
    assert written["turns"][1] == {
        "turn": 2,
        "prompt_tokens": 1557,
        "pulled_tokens": 1340,
        "recomputed_tokens": 217,
        "ttft_off_s": 6.4,
        "ttft_on_s": 0.8,
        "ratio": 8.0,
        "answer_off": "It will be delivered to the city of Bergen, Norway.",
        "answer_on": "It will be delivered to the city of Bergen, Norway.",
    }


def rendered(turns: list[TurnResult], width: int) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(results_table(turns))
    return output.getvalue()


def test_table_has_a_row_for_each_turn() -> None:
    """Every figure of a turn stands in its row, with its unit."""
    text = rendered([FIRST, SECOND], width=120)
    row = next(line for line in text.splitlines() if "1,557" in line)
    for figure in (
        "2",
        "1,340",
        "217",
        "6.40 s",
        "0.80 s",
        "8.0x",
        "It will be delivered …",
    ):
        assert figure in row


def test_table_fits_eighty_columns() -> None:
    """On a narrow terminal the answer is wrapped, and the figures stay whole."""
    text = rendered([FIRST, SECOND], width=80)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "1,340" in text
    assert "0.80 s" in text


def test_answers_with_brackets_are_shown_as_they_are() -> None:
    """A model may answer with what looks like markup."""
    assert "[bold] yes" in rendered([replace(FIRST, answer_on="[bold] yes")], width=120)


def test_first_words_are_on_one_line() -> None:
    """Line breaks in an answer do not break the table, and what is cut is marked."""
    assert first_words("one\ntwo  three") == "one two three"
    assert first_words("one two three four five") == "one two three four …"


def test_different_answers_are_found() -> None:
    """An answer that readback changed is noticed."""
    assert different_answers([FIRST, SECOND]) == []
    assert different_answers([FIRST, replace(SECOND, answer_on="No.")]) == [2]


def test_chart_is_written(result: DemoResult, tmp_path: Path) -> None:
    """The chart is a PNG of a readable size, also when there is only one turn."""
    for turns in ([FIRST, SECOND], [FIRST]):
        path = tmp_path / "build" / "demo.png"
        write_chart(replace(result, turns=turns), path)
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", data[16:24])
        assert width >= 1200
        assert height >= 700
