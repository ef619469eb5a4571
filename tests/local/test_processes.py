"""Local processes: nothing of them survives, and what goes wrong is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtide.local.processes import (
    ManagedProcess,
    ProcessError,
    python_environment,
    stop_all,
    wait_all,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# A tree as an engine's: the command, a child in a session of its own, and a grandchild; each writes
# its pid. The child ignores SIGTERM, as a stuck engine would.
TREE = """
import os, signal, subprocess, sys, time
from pathlib import Path
pids = Path(sys.argv[1])
depth = int(sys.argv[2]) if len(sys.argv) > 2 else 0
if depth:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if depth < 2:
    command = [sys.executable, "-S", __file__, str(pids), str(depth + 1)]
    subprocess.Popen(command, start_new_session=True)
(pids / str(os.getpid())).write_text("")
print("started", flush=True)
time.sleep(600)
"""


class Tree:
    """A process tree of three, and what is left of it."""

    def __init__(self, directory: Path) -> None:
        self._pids_dir = directory / "pids"
        self._pids_dir.mkdir()
        script = directory / "tree.py"
        script.write_text(TREE)
        self.command = [sys.executable, "-S", str(script), str(self._pids_dir)]
        self.process = ManagedProcess(
            "tree", self.command, log_path=directory / "tree.log", stop_timeout_s=0.5
        )

    def pids(self) -> list[int]:
        return [int(path.name) for path in self._pids_dir.iterdir()]

    def is_complete(self) -> bool:
        return len(self.pids()) == 3

    def alive(self) -> list[int]:
        return [pid for pid in self.pids() if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(tmp_path)
    yield tree
    tree.process.stop()
    for pid in tree.alive():
        os.kill(pid, signal.SIGKILL)


def python(code: str, log_path: Path) -> ManagedProcess:
    return ManagedProcess("python", [sys.executable, "-S", "-c", code], log_path=log_path)


def test_stop_ends_the_whole_tree(tree: Tree) -> None:
    """Stopping ends children that ignore SIGTERM and sit in sessions of their own."""
    tree.process.start()
    tree.process.wait_until(tree.is_complete, "complete", 20)
    assert sorted(tree.process.pids()) == sorted(tree.pids())
    tree.process.stop()
    assert tree.alive() == []
    assert not tree.process.is_running()


def test_kill_ends_the_whole_tree(tree: Tree) -> None:
    """A crash on purpose leaves nothing of the tree, and says that SIGKILL ended it."""
    tree.process.start()
    tree.process.wait_until(tree.is_complete, "complete", 20)
    tree.process.kill()
    assert tree.alive() == []
    assert tree.process.exit_code() == 128 + signal.SIGKILL


def test_orphans_end_with_the_command(tree: Tree) -> None:
    """When the command alone is killed, what it had started goes too."""
    tree.process.start()
    tree.process.wait_until(tree.is_complete, "complete", 20)
    command_pid = next(
        pid for pid in tree.pids() if Path(f"/proc/{pid}/cmdline").read_text().endswith("pids\0")
    )
    os.kill(command_pid, signal.SIGKILL)
    assert eventually(lambda: not tree.process.is_running())
    assert tree.alive() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_tree_ends_with_whoever_started_it(tree: Tree, tmp_path: Path, number: int) -> None:
    """Nothing survives a parent that dies, not even of SIGKILL."""
    parent_code = (
        "import sys, time; from pathlib import Path;"
        "from kvtide.local.processes import ManagedProcess;"
        "process = ManagedProcess('tree', sys.argv[2:], log_path=Path(sys.argv[1]), "
        "stop_timeout_s=0.5);"
        "process.start(); time.sleep(600)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code, str(tmp_path / "log"), *tree.command],
        env=python_environment(),
        stderr=subprocess.DEVNULL,
    )
    assert eventually(tree.is_complete)
    parent.send_signal(number)
    parent.wait()
    assert eventually(lambda: tree.alive() == [])


def test_suspended_tree_can_be_resumed_and_stopped(tree: Tree) -> None:
    """SIGSTOP reaches every process of the tree, SIGCONT too, and a stopped tree can be ended."""
    tree.process.start()
    tree.process.wait_until(tree.is_complete, "complete", 20)

    def states() -> set[str]:
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in tree.pids()]
        return {stat.rpartition(")")[2].split()[0] for stat in stats}

    tree.process.suspend()
    assert eventually(lambda: states() == {"T"})
    tree.process.resume()
    assert eventually(lambda: "T" not in states())
    tree.process.suspend()
    tree.process.stop()
    assert tree.alive() == []


def test_process_that_ends_early_is_reported_with_its_log(tmp_path: Path) -> None:
    """Waiting for a process that fails ends at once, with its exit code and its last words."""
    process = python("print('no such model'); raise SystemExit(3)", tmp_path / "log")
    with process, pytest.raises(ProcessError, match=r"(?s)exit code 3.*no such model"):
        process.wait_until(lambda: False, "ready", 60)


def test_process_that_is_never_ready_is_reported_with_its_log(tmp_path: Path) -> None:
    """Waiting has an end, and the error says what was awaited and what the log says."""
    code = "import time; print('busy', flush=True); time.sleep(600)"
    process = python(code, tmp_path / "log")
    with process:
        process.wait_until(lambda: process.log_lines("busy") != [], "busy", 60)
        with pytest.raises(ProcessError, match=r"(?s)not yet ready after 0 s.*busy"):
            process.wait_until(lambda: False, "ready", 0)


def test_command_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    """A command that cannot be run fails the wait and is named in the log."""
    process = ManagedProcess("none", ["/no/such/command"], log_path=tmp_path / "log")
    with process, pytest.raises(ProcessError, match=r"(?s)exit code 127.*/no/such/command"):
        process.wait_until(lambda: False, "ready", 60)


def test_exit_code_is_the_commands_own(tmp_path: Path) -> None:
    """The guard hides neither an exit code nor a signal."""
    for code, expected in (
        ("raise SystemExit(7)", 7),
        ("pass", 0),
        ("import os; os.kill(os.getpid(), 11)", 128 + 11),
    ):
        process = python(code, tmp_path / "log")
        process.start()
        assert eventually(lambda process=process: not process.is_running())
        assert process.exit_code() == expected


def test_process_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    """A fleet may be started from a worker thread that ends long before it."""
    process = python("import time; time.sleep(600)", tmp_path / "log")
    starter = threading.Thread(target=process.start)
    starter.start()
    starter.join()
    # A signal that the thread's end had sent would be there long before this one.
    process.suspend()
    process.resume()
    assert not eventually(lambda: not process.is_running(), timeout_s=1.0)
    process.stop()


def test_stop_is_idempotent_and_needs_no_start(tmp_path: Path) -> None:
    """Stopping twice, or before the start, is harmless."""
    process = python("import time; time.sleep(600)", tmp_path / "log")
    process.stop()
    process.start()
    process.stop()
    process.stop()
    process.kill()
    assert process.pids() == []


def test_restart_keeps_the_log_and_reads_only_the_new_part(tmp_path: Path) -> None:
    """After a restart the old lines are still in the file, and no longer taken for news."""
    process = python("import os; print(f'pid {os.getpid()}')", tmp_path / "log")
    lines = []
    for _ in range(2):
        process.start()
        assert eventually(lambda: not process.is_running())
        lines.append(process.log_lines("pid "))
    assert [len(some) for some in lines] == [1, 1]
    assert lines[0] != lines[1]
    assert (tmp_path / "log").read_text().splitlines() == lines[0] + lines[1]


def test_running_process_is_not_started_again(tmp_path: Path) -> None:
    """A second start of a running process is an error, not a second process."""
    process = python("import time; time.sleep(600)", tmp_path / "log")
    with process, pytest.raises(ProcessError, match="already runs"):
        process.start()


def test_several_processes_are_awaited_together(tmp_path: Path) -> None:
    """Progress names those that are not ready yet, and all are stopped side by side."""
    processes = [python("import time; time.sleep(600)", tmp_path / name) for name in "ab"]
    ready: set[int] = set()
    pending: list[int] = []

    def progress(_waited_s: float, waiting: list[ManagedProcess]) -> None:
        pending.append(len(waiting))
        ready.add(len(pending) - 1)

    for process in processes:
        process.start()
    try:
        wait_all(
            [
                (process, lambda index=index: index in ready)
                for index, process in enumerate(processes)
            ],
            "ready",
            60,
            progress,
        )
    finally:
        stop_all(processes)
    assert pending == [2, 1]
    assert not any(process.is_running() for process in processes)


def test_child_environment_leaves_our_settings_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KVTIDE_ variable in the shell does not reach what the demo starts; kvtide itself does."""
    monkeypatch.setenv("KVTIDE_ROUTER__READBACK_ENABLED", "false")
    monkeypatch.setenv("OTHER", "kept")
    environment = python_environment()
    assert "KVTIDE_ROUTER__READBACK_ENABLED" not in environment
    assert environment["OTHER"] == "kept"
    assert any(
        Path(path, "kvtide", "local").is_dir()
        for path in environment["PYTHONPATH"].split(os.pathsep)
    )
