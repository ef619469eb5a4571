"""Runs one command so that nothing of it can outlive whoever started it.

An engine is a tree of processes: an API server, an engine core, a worker, helpers. Killing the one
that was started leaves the others holding ports and memory. The guard stands above the tree
instead: orphans come back to it (it is a *subreaper*), and it ends only after everything below it.

* Its parent dies, however that happens: the guard gets SIGTERM from the kernel.
* It gets SIGTERM or SIGINT: it passes SIGTERM on, waits, then kills whatever is left.
* The command ends by itself or is killed: the guard kills what it left behind, and ends likewise.

Started by file name (see `processes.py`), with nothing but the standard library, so that it is up
in milliseconds: ``python guard.py PARENT_PID STOP_TIMEOUT_S COMMAND…``. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_AWAITED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_FOREVER_S = 3600.0

POLL_INTERVAL_S = 0.02
COMMAND_NOT_FOUND = 127


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def descendants(pid: int) -> list[int]:
    """The live processes below `pid`, without it; zombies do not count."""
    children: dict[int, list[int]] = {}
    zombies = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name, in parentheses, may hold anything; what follows it is regular.
            state, parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        child = int(entry.name)
        children.setdefault(int(parent), []).append(child)
        if state == b"Z":
            zombies.add(child)
    found: list[int] = []
    # Through zombies too: their children may have had another parent when we looked at them.
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return [child for child in found if child not in zombies]


def signal_all(pids: list[int], number: int) -> None:
    """Sends a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def run(parent_pid: int, stop_timeout_s: float, command: list[str]) -> int:
    """Runs `command` under guard and returns the exit code to end with."""
    # Blocked, and fetched one by one where we wait: no signal can fall between two instructions.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        return 0  # It died before we could ask to be told.
    try:
        child = subprocess.Popen(
            command,
            start_new_session=True,
            preexec_fn=_become_child,  # safe: this process has one thread
        )
    except OSError as error:
        print(f"guard: cannot run {command[0]}: {error}", file=sys.stderr, flush=True)
        return COMMAND_NOT_FOUND
    status = _wait(child.pid, stop_timeout_s)
    _kill_descendants()
    # Reaped behind its back: without this Popen would look for it again.
    child.returncode = 0
    if status is None:
        return 128 + signal.SIGKILL
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _become_child() -> None:
    """Between fork and exec: what the command is to start with."""
    # Should the guard itself be killed, at least the command goes with it.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)


def _wait(child_pid: int, stop_timeout_s: float) -> int | None:
    """Waits for the command, and stops it when asked to; its wait status, None if it still runs."""
    deadline_s: float | None = None
    while True:
        left_s = _FOREVER_S if deadline_s is None else deadline_s - time.monotonic()
        if left_s <= 0:
            return None
        arrived = signal.sigtimedwait(_AWAITED, left_s)
        ended = _reap()
        if child_pid in ended:
            return ended[child_pid]
        if deadline_s is None and arrived is not None and arrived.si_signo != signal.SIGCHLD:
            os.kill(child_pid, signal.SIGTERM)
            deadline_s = time.monotonic() + stop_timeout_s


def _kill_descendants() -> None:
    """Kills until nothing is left: a process may be forking while we look."""
    # Having no children is what counts. Orphans come back to us, so there is nothing below us
    # then; a look at /proc is no proof, for processes change parents while one looks.
    while _has_children():
        signal_all(descendants(os.getpid()), signal.SIGKILL)
        time.sleep(POLL_INTERVAL_S)
        _reap()


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _reap() -> dict[int, int]:
    """Takes leave of every child that has ended; pid to wait status."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
