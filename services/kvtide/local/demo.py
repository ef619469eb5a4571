"""`make demo`: a real conversation over a prefill and a decode engine, readback off and on.

Two vLLM engines and kvtide start on this machine; a scripted agent talks to them twice through the
unmodified OpenAI client. The prefill engine's own prefix cache is off, as in the published set-up:
it stands for a prefill engine that has not seen the conversation, or has long evicted it.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import urllib.request
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from openai import APIError, OpenAI
from rich.console import Console

from kvtide.local.chart import write_chart
from kvtide.local.conversation import SCRIPT, ScriptedTurn, system_message
from kvtide.local.display import Display
from kvtide.local.fleet import LocalFleet
from kvtide.local.metrics import UNSAFE_READS
from kvtide.local.model import ModelError, kv_bytes_per_token, prepare_model
from kvtide.local.ports import PortError
from kvtide.local.processes import ProcessError
from kvtide.local.results import (
    DemoResult,
    EngineVersions,
    TurnResult,
    different_answers,
    first_words,
    results_table,
)
from kvtide.local.turns import (
    REQUEST_TIMEOUT_S,
    Conversation,
    KvGeometry,
    TurnError,
    TurnOutcome,
    reuse_problem,
    settled_problems,
)
from kvtide.runtime.engine_command import EngineRole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PREFILL, DECODE = "prefill-0", "decode-0"
# Pulled and recomputed KV are the same to the last bit, near enough: in bfloat16 they would round
# apart, and the two answers with them.
DTYPE, DTYPE_BYTES = "float32", 4

EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130


def main(argv: list[str] | None = None) -> int:
    """Runs the demo; returns the exit code: 0, 1 when something is wrong, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="kvtide demo", description=__doc__)
    parser.add_argument(
        "--keep",
        action="store_true",
        help="leave everything running, until Ctrl-C, and say how to try it",
    )
    parser.add_argument(
        "--build-dir", type=Path, default=Path("build"), help="where model, logs and results go"
    )
    options = parser.parse_args(argv)
    console = Console()
    with _first_signal_interrupts():
        try:
            return _run(options.build_dir, Display(console), keep=options.keep)
        except KeyboardInterrupt:
            console.print("interrupted; everything that was started has been stopped")
            return EXIT_INTERRUPTED
        except (ModelError, ProcessError, PortError, TurnError, APIError, OSError) as error:
            console.print(f"the demo failed: {error}", markup=False, style="red")
            console.print(f"logs: {options.build_dir / 'logs'}", markup=False)
            return EXIT_FAILED


def _run(build_dir: Path, display: Display, *, keep: bool) -> int:
    log_dir = build_dir / "logs"
    with display:
        display.step("preparing the model")
        model_dir = prepare_model(build_dir / "models", log_dir, display.detail)
        display.done(f"model: {model_dir}")
    fleet = LocalFleet(
        model_dir,
        engine={"dtype": DTYPE},
        role_engine={EngineRole.PREFILL: {"prefix_caching": False}},
        log_dir=log_dir,
        progress=lambda _waited_s, stages: display.detail(_stages_line(stages)),
    )
    try:
        with display:
            display.step("starting a prefill engine, a decode engine and kvtide")
            fleet.start()
            display.done(f"engines and kvtide are ready: {fleet.http_url}")
            demo = Demo(fleet, display)
            result = demo.run()
        problems = _show(result, demo.problems, build_dir, display)
        if keep:
            _keep_running(fleet, display.console)
    finally:
        with _signals_ignored(), display:
            display.step("stopping everything")
            fleet.stop()
            display.done("everything has been stopped")
    return EXIT_FAILED if problems else EXIT_OK


class Demo:
    """The conversation, twice, over a fleet that is ready."""

    def __init__(self, fleet: LocalFleet, display: Display) -> None:
        self.problems: list[str] = []
        """What did not agree with what was expected, one line each."""
        self._fleet = fleet
        self._display = display
        # No retries: a turn that fails is to be seen.
        self._client = OpenAI(
            base_url=f"{fleet.http_url}/v1",
            api_key="none",
            timeout=REQUEST_TIMEOUT_S,
            max_retries=0,
        )
        self._geometry = KvGeometry(
            bytes_per_token=kv_bytes_per_token(fleet.model_dir, DTYPE_BYTES),
            block_size_tokens=fleet.nodes()[PREFILL].info.block_size_tokens,
        )

    def run(self) -> DemoResult:
        """Has all turns, and closes the conversations."""
        with self._client:
            self._warm_up()
            run_id = f"{time.time():.0f}"
            off = self._conversation(f"demo-off-{run_id}", readback=False)
            on = self._conversation(f"demo-on-{run_id}", readback=True)
            turns = [self._turn(number, turn, off, on) for number, turn in enumerate(SCRIPT, 1)]
            self._close(off)
            self._close(on)
        unsafe_reads = int(self._fleet.metrics(DECODE)[UNSAFE_READS])
        if unsafe_reads:
            self.problems.append(f"{unsafe_reads} reads of blocks that decode had freed before")
        versions = EngineVersions(
            vllm=self._fleet.nodes()[PREFILL].info.vllm_version, nixl=version("nixl")
        )
        return DemoResult(self._fleet.model_name, versions, turns, unsafe_reads)

    def _warm_up(self) -> None:
        """Has the first requests and the first reads of both engines, which are slower."""
        self._display.step("warming up")
        warm_up = self._conversation("demo-warm-up", readback=True)
        for turn in SCRIPT[:2]:
            warm_up.turn(turn.message())
        self._close(warm_up)
        self._display.done("warmed up: the engines know each other")

    def _turn(
        self, number: int, turn: ScriptedTurn, off: Conversation, on: Conversation
    ) -> TurnResult:
        # Who goes first changes from turn to turn, so that neither gains by it.
        order = (off, on) if number % 2 else (on, off)
        self._display.step(f"turn {number} of {len(SCRIPT)}")
        outcomes = {who.readback: self._half_turn(number, turn, who) for who in order}
        without, with_readback = outcomes[False], outcomes[True]
        report = with_readback.report
        result = TurnResult(
            turn=number,
            prompt_tokens=report["prompt_tokens"],
            pulled_tokens=report["pulled_tokens"],
            recomputed_tokens=report["recomputed_tokens"],
            ttft_off_s=without.ttft_s,
            ttft_on_s=with_readback.ttft_s,
            answer_off=without.answer,
            answer_on=with_readback.answer,
        )
        self._display.done(
            f"turn {number}: {result.prompt_tokens:,} tokens, first token after "
            f"{result.ttft_off_s:.2f} s off, {result.ttft_on_s:.2f} s on"
        )
        return result

    def _half_turn(self, number: int, turn: ScriptedTurn, who: Conversation) -> TurnOutcome:
        label = f"readback {'on' if who.readback else 'off'}"
        self._display.detail(f"{label}, waiting for the first token")
        before = self._fleet.metrics(PREFILL)
        outcome = who.turn(
            turn.message(), lambda answer: self._display.detail(f"{label}, {first_words(answer)}")
        )
        found = settled_problems(
            outcome, before, lambda: self._fleet.metrics(PREFILL), self._geometry
        )
        found.append(reuse_problem(number, outcome, readback=who.readback))
        self.problems += [f"turn {number}, {label}: {problem}" for problem in found if problem]
        return outcome

    def _conversation(self, session_id: str, *, readback: bool) -> Conversation:
        return Conversation(
            self._client,
            self._fleet.model_name,
            session_id,
            readback=readback,
            system=system_message(),
        )

    def _close(self, conversation: Conversation) -> None:
        """Lets the conversation's blocks go."""
        url = f"{self._fleet.http_url}/v1/conversations/{conversation.session_id}"
        request = urllib.request.Request(url, method="DELETE")  # noqa: S310 - our own http URL
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S):  # noqa: S310
            pass


def _show(result: DemoResult, problems: list[str], build_dir: Path, display: Display) -> list[str]:
    """Prints and writes what came out; returns the problems."""
    console = display.console
    console.print()
    console.print(results_table(result.turns))
    different = different_answers(result.turns)
    if different:
        turns = ", ".join(str(turn) for turn in different)
        console.print(
            f"The answers with and without readback differ in turn {turns}.", style="yellow"
        )
    else:
        console.print(f"All {len(result.turns)} answers are the same with and without readback.")
    console.print(f"Reads of blocks that were no longer held: {result.unsafe_reads}")
    result.write(build_dir / "demo.json")
    write_chart(result, build_dir / "demo.png")
    console.print(f"Written: {build_dir / 'demo.json'}, {build_dir / 'demo.png'}", markup=False)
    for problem in problems:
        console.print(f"WRONG: {problem}", markup=False, style="bold red")
    console.print()
    return problems


def _keep_running(fleet: LocalFleet, console: Console) -> None:
    """Says how to try it, and waits for Ctrl-C. Raises ProcessError if something ends meanwhile."""
    console.print("Everything keeps running; Ctrl-C stops it. Try, in another terminal:\n")
    # Plain print: these lines are to be copied, and rich would break them.
    print(try_curl(fleet.http_url, fleet.model_name))
    console.print("\nor, in Python (.venv/bin/python):\n")
    print(try_python(fleet.http_url, fleet.model_name), flush=True)
    try:
        while True:
            fleet.check_running()
            time.sleep(0.5)
    except KeyboardInterrupt:
        console.print()


def try_curl(url: str, model: str) -> str:
    """A line for a shell that has one turn and shows what kvtide says of it."""
    body = (
        f'{{"model": "{model}", "messages": [{{"role": "user", '
        '"content": "What is the capital of France?"}]}'
    )
    return (
        f"curl -i {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"-H 'X-Session-ID: try-curl' -d '{body}'"
    )


def try_python(url: str, model: str) -> str:
    """A snippet that has two turns of a conversation and prints how much the second one reused."""
    return f"""\
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="none")
messages = [{{"role": "system", "content": "You are a helpful assistant. " * 40}}]
for question in ("What is the capital of France?", "And of Italy?"):
    messages.append({{"role": "user", "content": question}})
    response = client.chat.completions.with_raw_response.create(
        model="{model}", messages=messages, temperature=0, max_tokens=48,
        extra_headers={{"X-Session-ID": "try-python"}},
    )
    answer = response.parse().choices[0].message.content
    messages.append({{"role": "assistant", "content": answer}})
    print(answer, response.headers["X-Kvtide-Turn"])
"""


def _stages_line(stages: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {stage}" for name, stage in stages.items())


@contextmanager
def _first_signal_interrupts() -> Iterator[None]:
    """SIGINT and SIGTERM interrupt once; what follows is cleaning up, which nothing interrupts."""

    def interrupt(_number: int, _frame: object) -> NoReturn:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {n: signal.signal(n, interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
