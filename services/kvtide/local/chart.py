"""The demo's chart: time to first token, turn by turn, readback off and on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from kvtide.local.results import DemoResult

_OFF_COLOUR = "#b0413e"
_ON_COLOUR = "#2a6f97"


def write_chart(result: DemoResult, path: Path) -> None:
    """Writes the chart of a demo as PNG."""
    # Without pyplot: no display, and no state shared with whoever else draws in this process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure.add_subplot(), result)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw(axes: Any, result: DemoResult) -> None:
    turns = result.turns
    tokens = [turn.prompt_tokens for turn in turns]
    off = [turn.ttft_off_s for turn in turns]
    on = [turn.ttft_on_s for turn in turns]
    axes.fill_between(tokens, on, off, color=_OFF_COLOUR, alpha=0.06, linewidth=0)
    axes.plot(tokens, off, "o-", color=_OFF_COLOUR, label="readback off: prefill recomputes")
    axes.plot(tokens, on, "o-", color=_ON_COLOUR, label="readback on: prefill pulls from decode")
    for turn in turns:
        axes.annotate(
            f"turn {turn.turn}\n{turn.ratio:.1f}x",
            (turn.prompt_tokens, turn.ttft_off_s),
            textcoords="offset points",
            xytext=(0, 9),
            ha="center",
            fontsize=9,
        )
    axes.set_title(
        "Time to first token of a growing conversation\n"
        f"{result.model}, one prefill and one decode engine "
        f"(vLLM {result.engines.vllm}, NIXL {result.engines.nixl})",
        fontsize=11,
        loc="left",
    )
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("time to first token, seconds")
    axes.set_ylim(0, max([*off, *on]) * 1.22)
    axes.margins(x=0.07)
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
