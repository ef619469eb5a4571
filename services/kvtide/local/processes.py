"""Processes that can be started, watched, hurt on purpose, and stopped without a trace.

Each runs under `guard.py`, which sees to it that no process of the tree outlives this one, and
writes its output to a log file. Nothing here knows what the processes are.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Self

import kvtide
from kvtide.local import guard

if TYPE_CHECKING:
    from types import TracebackType

POLL_INTERVAL_S = 0.1
DEFAULT_STOP_TIMEOUT_S = 15.0
LOG_TAIL_LINES = 25
# Gigabytes of memory take a while to be given back on a busy machine.
_DEATH_TIMEOUT_S = 60.0

# To Linux a parent is a thread: processes end with the thread that started them, so start them all
# from one that lives as long as we do.
_STARTER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvtide-start")

Progress = Callable[[float], None]
"""Called again and again while something is awaited, with the seconds that it took so far."""


class ProcessError(Exception):
    """A process ended, or did not get ready in time; the message holds the end of its log."""


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a Python module with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def python_environment() -> dict[str, str]:
    """The environment of this process, for a Python child that has to find `kvtide` as we did.

    Our own settings (KVTIDE_…) are left out: what is started here is told everything by whoever
    starts it, and a variable that someone forgot in a shell must not change it.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_")
    }
    roots = [str(Path(portion).parent) for portion in kvtide.__path__]
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*roots, *filter(None, paths)]))
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


class ManagedProcess:
    """One command, its process tree and its log.

    `env` is its whole environment; None: this process's own. The log begins anew with the first
    start and goes on after a restart.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        stop_timeout_s: float = DEFAULT_STOP_TIMEOUT_S,
    ) -> None:
        self.name = name
        self.command = list(command)
        self.log_path = log_path
        self.env = None if env is None else dict(env)
        self.stop_timeout_s = stop_timeout_s
        self._guard: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self) -> None:
        """Starts the command. Raises ProcessError if it still runs."""
        if self.is_running():
            raise ProcessError(f"{self.name} already runs")
        starting = _STARTER.submit(self._start_guard)
        try:
            starting.result()
        except BaseException:
            # Ctrl-C: whoever cleans up must find the process that is being started.
            starting.result()
            raise

    def _start_guard(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb" if self._guard is None else "ab") as log:
            self._log_start = log.tell()
            self._guard = subprocess.Popen(
                # -S and -E: the guard needs no site packages, and is up at once.
                [
                    *(sys.executable, "-S", "-E", guard.__file__),
                    *(str(os.getpid()), str(self.stop_timeout_s)),
                    *self.command,
                ],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal is for us to handle, not for each process by itself.
                start_new_session=True,
            )

    def is_running(self) -> bool:
        """From the start until the last process of its tree has ended."""
        return self._guard is not None and self._guard.poll() is None

    def exit_code(self) -> int | None:
        """None before the start and while it runs; 128 + n if signal n ended it."""
        return None if self._guard is None else self._guard.poll()

    def pids(self) -> list[int]:
        """The processes of the tree, the guard excepted; empty once all of them ended."""
        if self._guard is None or not self.is_running():
            return []
        return guard.descendants(self._guard.pid)

    def stop(self) -> None:
        """Ends the whole tree: SIGTERM, and SIGKILL after `stop_timeout_s`. Idempotent."""
        self.request_stop()
        self.wait_stopped()

    def request_stop(self) -> None:
        """The first half of `stop`, so that several processes can stop side by side."""
        if self._guard is not None and self.is_running():
            self.resume()  # A stopped process would sleep through its SIGTERM.
            self._guard.send_signal(signal.SIGTERM)

    def wait_stopped(self) -> None:
        """The second half of `stop`."""
        if self._guard is None:
            return
        try:
            self._guard.wait(self.stop_timeout_s + _DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # The guard itself is stuck (it was stopped, say): do its work here.
            guard.signal_all([*self.pids(), self._guard.pid], signal.SIGKILL)
            self._guard.wait()

    def kill(self) -> None:
        """Kill -9 of the whole tree at once, as a crash would; returns once it is gone."""
        if self._guard is None:
            return
        # Again until nothing is left: a process may be forking while we look.
        while self.is_running():
            guard.signal_all(self.pids(), signal.SIGKILL)
            try:
                self._guard.wait(POLL_INTERVAL_S)
            except subprocess.TimeoutExpired:
                continue

    def suspend(self) -> None:
        """SIGSTOP: the tree keeps its sockets and memory, and answers nothing."""
        guard.signal_all(self.pids(), signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT: ends `suspend`."""
        guard.signal_all(self.pids(), signal.SIGCONT)

    def wait_until(
        self,
        condition: Callable[[], bool],
        description: str,
        timeout_s: float,
        progress: Progress = lambda _: None,
    ) -> None:
        """Returns once `condition` holds.

        Raises ProcessError, with the end of the log, if the process ends first or the time is up.
        """
        wait_all(
            [(self, condition)], description, timeout_s, lambda waited_s, _: progress(waited_s)
        )

    def log_lines(self, prefix: str = "") -> list[str]:
        """Those lines of its log, since it was last started, that begin so."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(self._log_start)
                lines = file.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        return [line for line in lines if line.startswith(prefix)]

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of its log, since it was last started."""
        return "\n".join(self.log_lines()[-lines:])

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def wait_all(
    awaited: Sequence[tuple[ManagedProcess, Callable[[], bool]]],
    description: str,
    timeout_s: float,
    progress: Callable[[float, list[ManagedProcess]], None] = lambda _waited_s, _pending: None,
) -> None:
    """Returns once each process meets its condition; `progress` gets those that do not yet.

    Raises ProcessError as soon as one of them ends without meeting it, or when the time is up.
    """
    started_s = time.monotonic()
    pending = list(awaited)
    while True:
        # Before the condition: a process that met it and then ended has met it.
        ended = [process for process, _ in pending if not process.is_running()]
        pending = [(process, condition) for process, condition in pending if not condition()]
        waiting = [process for process, _ in pending]
        if not waiting:
            return
        for process in ended:
            if process in waiting:
                raise ProcessError(
                    f"{process.name} ended with exit code {process.exit_code()} before "
                    f"{description}; the end of {process.log_path}:\n{process.log_tail()}"
                )
        waited_s = time.monotonic() - started_s
        if waited_s >= timeout_s:
            raise ProcessError(
                f"{', '.join(process.name for process in waiting)}: not yet {description} after "
                f"{timeout_s:.0f} s; the end of {waiting[0].log_path}:\n{waiting[0].log_tail()}"
            )
        progress(waited_s, waiting)
        time.sleep(POLL_INTERVAL_S)


def stop_all(processes: Sequence[ManagedProcess]) -> None:
    """Stops several processes side by side."""
    for process in processes:
        process.request_stop()
    for process in processes:
        process.wait_stopped()
