"""What the demo measured: the figures of each turn, as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FIRST_WORDS = 4


@dataclass(frozen=True)
class TurnResult:
    """One turn, had twice: with readback off and on. Times in seconds, counts in tokens."""

    turn: int
    """From 1."""
    prompt_tokens: int
    pulled_tokens: int
    """Readback on: tokens whose KV prefill read back, as the prefill engine counted them."""
    recomputed_tokens: int
    """Readback on: tokens that prefill computed."""
    ttft_off_s: float
    """From sending the request to the first piece of the answer."""
    ttft_on_s: float
    answer_off: str
    answer_on: str

    @property
    def ratio(self) -> float:
        """How many times sooner the answer starts with readback."""
        return self.ttft_off_s / self.ttft_on_s

    def as_json(self) -> dict[str, Any]:
        """As in demo.json: milliseconds and hundredths are precise enough."""
        return {
            "turn": self.turn,
            "prompt_tokens": self.prompt_tokens,
            "pulled_tokens": self.pulled_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "ttft_off_s": round(self.ttft_off_s, 3),
            "ttft_on_s": round(self.ttft_on_s, 3),
            "ratio": round(self.ratio, 2),
            "answer_off": self.answer_off,
            "answer_on": self.answer_on,
        }


@dataclass(frozen=True)
class EngineVersions:
    """What computed and what moved the KV."""

    vllm: str
    nixl: str


@dataclass(frozen=True)
class DemoResult:
    """The whole demo."""

    model: str
    engines: EngineVersions
    turns: Sequence[TurnResult]
    unsafe_reads: int
    """Reads of the decode engine's blocks that ended after it had freed them. Must be 0."""

    def as_json(self) -> dict[str, Any]:
        """The content of demo.json."""
        return {
            "model": self.model,
            "engines": asdict(self.engines),
            "turns": [turn.as_json() for turn in self.turns],
            "unsafe_reads": self.unsafe_reads,
        }

    def write(self, path: Path) -> None:
        """Writes demo.json."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(), indent=2, ensure_ascii=False) + "\n")


def results_table(turns: Sequence[TurnResult]) -> Table:
    """One row for each turn."""
    table = Table(
        title="Time to first token (TTFT), readback off and on",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in (
        "turn",
        "prompt\ntokens",
        "tokens\npulled",
        "tokens\nrecomputed",
        "TTFT\noff",
        "TTFT\non",
        "ratio",
    ):
        # On a narrow terminal the answer gives way, never a figure.
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("answer")
    for turn in turns:
        table.add_row(
            str(turn.turn),
            f"{turn.prompt_tokens:,}",
            f"{turn.pulled_tokens:,}",
            f"{turn.recomputed_tokens:,}",
            f"{turn.ttft_off_s:.2f} s",
            f"{turn.ttft_on_s:.2f} s",
            f"{turn.ratio:.1f}x",
            # An answer may contain anything, also what rich would take for markup.
            first_words(turn.answer_on).replace("[", r"\["),
        )
    return table


def first_words(answer: str) -> str:
    """How an answer begins, on one line."""
    words = answer.split()
    return " ".join(words[:FIRST_WORDS]) + (" …" if len(words) > FIRST_WORDS else "")


def different_answers(turns: Sequence[TurnResult]) -> list[int]:
    """The turns whose answers are not the same with and without readback."""
    return [turn.turn for turn in turns if turn.answer_off != turn.answer_on]
