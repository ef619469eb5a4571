"""`make demo`, for real: what it measures, and that it leaves nothing behind."""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from kvtide.local.demo import try_curl, try_python
from kvtide.local.ports import is_free
from kvtide.local.processes import python_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

BUILD_DIR = Path("build")
"""The real one: the model in it is prepared once."""
READY_TIMEOUT_S = 600.0


class RunningDemo:
    """The demo in a process of its own, as `make demo` starts it."""

    def __init__(self, *arguments: str) -> None:
        self.output = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvtide.local.demo", *arguments],
            env=python_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._processes: list[psutil.Process] = []
        self._ports: set[int] = set()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line

    def wait_for(self, text: str) -> None:
        """Until the demo has said this."""
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while text not in self.output:
            assert self._process.poll() is None, self.output
            assert time.monotonic() < deadline_s, self.output
            time.sleep(0.1)

    def wait_for_weights(self) -> None:
        """Until both engines are in the middle of their start."""
        started_s = time.time()
        logs = [BUILD_DIR / "logs" / f"{name}-0.log" for name in ("prefill", "decode")]
        while not all(
            log.exists()
            and log.stat().st_mtime >= started_s - 5
            and "Starting to load model" in log.read_text(errors="replace")
            for log in logs
        ):
            assert self._process.poll() is None, self.output
            assert time.time() < started_s + READY_TIMEOUT_S, self.output
            time.sleep(0.1)

    def note_what_runs(self) -> None:
        """Remembers processes and ports, to look for them afterwards."""
        self._processes = psutil.Process(self._process.pid).children(recursive=True)
        for process in self._processes:
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    self._ports.add(connection.laddr.port)

    @property
    def running_count(self) -> int:
        return len(self._processes)

    @property
    def port_count(self) -> int:
        return len(self._ports)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """Until it ends; its exit code."""
        code = self._process.wait(READY_TIMEOUT_S)
        self._reader.join()
        return code

    def left_behind(self) -> list[str]:
        """Processes and ports that are still there."""
        alive = [f"process {process}" for process in self._processes if process.is_running()]
        return alive + [f"port {port}" for port in self._ports if not is_free(port)]

    def end(self) -> None:
        """For a test that failed half-way."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()


@pytest.fixture
def demo(request: pytest.FixtureRequest) -> Iterator[RunningDemo]:
    running = RunningDemo(*request.param)
    yield running
    running.end()


@pytest.mark.engine
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("demo", [["--keep"]], indirect=True)
def test_demo_measures_shows_and_can_be_tried(demo: RunningDemo) -> None:
    """Later turns pull, answers stay the same, what is printed to try works, Ctrl-C ends it all."""
    demo.wait_for("Ctrl-C stops it")
    demo.wait_for('print(answer, response.headers["X-Kvtide-Turn"])')
    demo.note_what_runs()
    assert demo.running_count >= 9  # guards, kvtide, and three processes of each engine
    assert demo.port_count >= 6

    result = json.loads((BUILD_DIR / "demo.json").read_text())
    assert result["unsafe_reads"] == 0
    turns = result["turns"]
    assert len(turns) >= 5
    assert turns[0]["pulled_tokens"] == 0
    for before, turn in itertools.pairwise(turns):
        assert turn["pulled_tokens"] + turn["recomputed_tokens"] == turn["prompt_tokens"]
        assert before["prompt_tokens"] < turn["pulled_tokens"] < turn["prompt_tokens"]
    for turn in turns:
        assert turn["answer_on"] == turn["answer_off"] != ""
    assert "WRONG" not in demo.output
    assert (BUILD_DIR / "demo.png").read_bytes().startswith(b"\x89PNG")

    curl = re.search(r"^curl .*$", demo.output, re.MULTILINE)
    assert curl is not None
    tried = run(["bash", "-c", curl.group()])
    assert "200 OK" in tried
    assert "X-Kvtide-Turn" in tried
    assert "Paris" in tried
    snippet = demo.output[demo.output.index("from openai import OpenAI") :]
    second_answer = run([sys.executable, "-c", snippet]).splitlines()[-1]
    assert '"reuse":"pulled"' in second_answer

    demo.send(signal.SIGINT)
    assert demo.wait() == 0
    assert demo.left_behind() == []


@pytest.mark.engine
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("demo", [[]], indirect=True)
@pytest.mark.parametrize("moment", ["engines start", "a turn runs"])
def test_interrupted_demo_leaves_nothing(demo: RunningDemo, moment: str) -> None:
    """Ctrl-C while engines start, or in the middle of a turn, stops everything that was started."""
    if moment == "engines start":
        demo.wait_for_weights()
    else:
        demo.wait_for("turn 1 of")
    demo.note_what_runs()
    assert demo.running_count >= 6
    demo.send(signal.SIGINT)
    # A second one, as an impatient person sends it, must not spoil the cleaning up.
    time.sleep(0.2)
    demo.send(signal.SIGINT)
    assert demo.wait() == 130
    assert demo.left_behind() == []
    assert "everything that was started has been stopped" in demo.output


@pytest.mark.engine
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("demo", [[]], indirect=True)
def test_killed_demo_leaves_nothing(demo: RunningDemo) -> None:
    """Even kill -9 of the demo leaves no engine running."""
    demo.wait_for_weights()
    demo.note_what_runs()
    demo.send(signal.SIGKILL)
    assert demo.wait() == -signal.SIGKILL
    deadline_s = time.monotonic() + 120
    while demo.left_behind():
        assert time.monotonic() < deadline_s, demo.left_behind()
        time.sleep(0.1)


def run(command: list[str]) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        command, env=python_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl_line_is_one_shell_command_with_valid_json() -> None:
    """The line that is printed survives the shell, and its body is JSON."""
    words = shlex.split(try_curl("http://127.0.0.1:1", "a-model"))
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "a-model"
    assert "\n" not in try_curl("http://127.0.0.1:1", "a-model")


def test_python_snippet_is_python() -> None:
    """The snippet that is printed compiles, and names this endpoint and model."""
    snippet = try_python("http://127.0.0.1:1", "a-model")
    ast.parse(snippet)
    assert "http://127.0.0.1:1/v1" in snippet
    assert "a-model" in snippet
