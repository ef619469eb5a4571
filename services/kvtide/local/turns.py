"""Has the demo's turns through kvtide's endpoint, and checks what is reported of them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvtide.local.conversation import ANSWER_TOKENS, Message
from kvtide.local.metrics import BYTES_READ, TOKENS_COMPUTED, TOKENS_READ

if TYPE_CHECKING:
    from openai import OpenAI

TURN_HEADER = "X-Kvtide-Turn"
SESSION_HEADER = "X-Session-ID"
READBACK_HEADER = "X-Kvtide-Readback"

REQUEST_TIMEOUT_S = 600.0
_COUNTERS_TIMEOUT_S = 10.0
_COUNTERS_INTERVAL_S = 0.1

Metrics = Mapping[str, float]


class TurnError(Exception):
    """A turn did not go as it must; the message says which one and how."""


@dataclass(frozen=True)
class TurnOutcome:
    """One turn with readback off or on."""

    answer: str
    ttft_s: float
    """From sending the request to the first piece of the answer."""
    report: Mapping[str, Any]
    """What kvtide says of the turn: the fields of `kvtide.v1.TurnReport`."""


@dataclass(frozen=True)
class KvGeometry:
    """How large KV is in the engines at hand."""

    bytes_per_token: int
    block_size_tokens: int

    def block_bytes(self, tokens: int) -> int:
        """Bytes of the blocks that hold so many tokens: NIXL moves whole blocks."""
        blocks = math.ceil(tokens / self.block_size_tokens)
        return blocks * self.block_size_tokens * self.bytes_per_token


class Conversation:
    """One conversation over the OpenAI API; its history grows with each turn."""

    def __init__(
        self, client: OpenAI, model: str, session_id: str, *, readback: bool, system: Message
    ) -> None:
        self.session_id = session_id
        self.readback = readback
        self._client = client
        self._model = model
        self._messages = [system]

    def turn(
        self, message: Message, on_text: Callable[[str], None] = lambda _: None
    ) -> TurnOutcome:
        """Asks, and streams the answer; `on_text` gets all of it that is there, piece by piece."""
        self._messages.append(message)
        headers = {SESSION_HEADER: self.session_id}
        if not self.readback:
            headers[READBACK_HEADER] = "off"
        started_s = time.monotonic()
        response = self._client.chat.completions.with_raw_response.create(
            model=self._model,
            messages=self._messages,
            temperature=0,
            max_tokens=ANSWER_TOKENS,
            stream=True,
            extra_headers=headers,
        )
        answer = ""
        ttft_s = 0.0
        with response.parse() as stream:
            for chunk in stream:
                piece = chunk.choices[0].delta.content if chunk.choices else None
                if not piece:
                    continue
                ttft_s = ttft_s or time.monotonic() - started_s
                answer += piece
                on_text(answer)
        if not answer:
            raise TurnError(f"{self.session_id}: the answer to turn {self._number} is empty")
        self._messages.append({"role": "assistant", "content": answer})
        return TurnOutcome(answer, ttft_s, self._report(response.headers.get(TURN_HEADER)))

    @property
    def _number(self) -> int:
        return len(self._messages) // 2

    def _report(self, header: str | None) -> Mapping[str, Any]:
        if header is None:
            raise TurnError(f"the answer has no {TURN_HEADER} header: is that kvtide's endpoint?")
        report: Mapping[str, Any] = json.loads(header)
        return report


def check_outcome(
    outcome: TurnOutcome, before: Metrics, after: Metrics, geometry: KvGeometry
) -> list[str]:
    """Holds the report of a turn against the prefill engine's own counters, before and after.

    Returns what does not agree, one line each.
    """
    report = outcome.report
    expectations = (
        ("tokens pulled", TOKENS_READ, report["pulled_tokens"]),
        ("tokens recomputed", TOKENS_COMPUTED, report["recomputed_tokens"]),
        ("bytes pulled", BYTES_READ, geometry.block_bytes(report["pulled_tokens"])),
    )
    problems = []
    for what, counter, expected in expectations:
        if counter not in after:
            problems.append(f"the prefill engine does not count {counter}")
            continue
        counted = int(after[counter] - before.get(counter, 0.0))
        if counted != expected:
            problems.append(
                f"{what}: kvtide's report means {expected:,}, "
                f"the prefill engine counted {counted:,}"
            )
    return problems


def settled_problems(
    outcome: TurnOutcome, before: Metrics, read: Callable[[], Metrics], geometry: KvGeometry
) -> list[str]:
    """`check_outcome`, once the counters had time to settle: engines publish them a little late."""
    deadline_s = time.monotonic() + _COUNTERS_TIMEOUT_S
    while True:
        problems = check_outcome(outcome, before, read(), geometry)
        if not problems or time.monotonic() >= deadline_s:
            return problems
        time.sleep(_COUNTERS_INTERVAL_S)


def reuse_problem(number: int, outcome: TurnOutcome, *, readback: bool) -> str:
    """What is wrong with how much was pulled in this turn (from 1); empty if nothing is."""
    pulled = outcome.report["pulled_tokens"]
    expected = readback and number > 1
    if expected and not pulled:
        return f"nothing was pulled, because: {outcome.report['reuse']}"
    if pulled and not expected:
        return f"{pulled:,} tokens were pulled, though nothing should have been"
    return ""
