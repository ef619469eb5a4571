"""Progress for people: a spinner and the time on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console

_DETAIL_INTERVAL_S = 5.0
"""Without a terminal, details are given this often at most, so that a log stays readable."""
_LIFE_SIGN_INTERVAL_S = 20.0
"""Without a terminal, a long step is mentioned again this often, so that a log shows life."""


class Display:
    """Says what is going on.

    `step` begins something, `detail` says more about it as often as one likes, `done` ends it with
    a line that stays.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._started_s = time.monotonic()
        self._step = ""
        self._step_started_s = self._started_s
        self._said = ""
        self._said_s = self._started_s
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", visible=False)

    def step(self, text: str) -> None:
        """Begins a step; ends the one before it, silently."""
        self._step = text
        self._step_started_s = time.monotonic()
        self._progress.reset(self._task, description=escape(text), visible=True)
        if not self.console.is_terminal:
            self._say(f"{text} …")

    def detail(self, text: str) -> None:
        """What the step is busy with now."""
        line = f"{self._step}: {text}"
        self._progress.update(self._task, description=escape(line), refresh=True)
        if not self.console.is_terminal:
            waited_s = time.monotonic() - self._said_s
            interval_s = _DETAIL_INTERVAL_S if line != self._said else _LIFE_SIGN_INTERVAL_S
            if waited_s >= interval_s:
                self._say(line)

    def done(self, text: str) -> None:
        """Ends the step."""
        took_s = time.monotonic() - self._step_started_s
        self._progress.update(self._task, visible=False)
        line = f"{escape(text)} [dim]({took_s:.0f} s)[/dim]"
        self.console.print(line, highlight=False, soft_wrap=True)

    def elapsed_s(self) -> float:
        """Since the display was made."""
        return time.monotonic() - self._started_s

    def _say(self, line: str) -> None:
        self._said = line
        self._said_s = time.monotonic()
        self.console.print(
            f"{self.elapsed_s():4.0f} s  {line}", markup=False, highlight=False, soft_wrap=True
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
