"""Progress: a terminal sees a spinner, a log file sees lines that it can keep."""

from __future__ import annotations

import io

from rich.console import Console

from kvtide.local.display import Display


def shown(*, terminal: bool) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=60)
    with Display(console) as display:
        display.step("starting")
        for number in range(50):
            display.detail(f"engine [{number}] loads")
        display.done("ready: [http] " + "x" * 80)
    return output.getvalue()


def test_log_file_gets_plain_lines() -> None:
    """Without a terminal there is no escape sequence, and details do not flood the file."""
    text = shown(terminal=False)
    assert "\x1b" not in text
    assert "starting …" in text
    assert len(text.splitlines()) <= 3


def test_lines_that_stay_are_not_broken() -> None:
    """A long line, an address say, can be copied from a log."""
    assert "ready: [http] " + "x" * 80 + " (0 s)" in shown(terminal=False).splitlines()


def test_terminal_sees_every_step_and_keeps_the_end() -> None:
    """On a terminal details replace each other, and brackets are not taken for markup."""
    text = shown(terminal=True)
    assert "engine [49] loads" in text
    assert "ready: [http]" in text
