"""One request inside the fake engine, and what comes out of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fakes.engine.model import Sample


class Status(Enum):
    """Where a request stands; the finished ones are the last four."""

    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()
    FINISHED_ERROR = auto()

    @property
    def finished(self) -> bool:
        """Whether the request will generate nothing more."""
        return self.value >= Status.FINISHED_STOPPED.value


FINISH_REASONS = {
    Status.FINISHED_STOPPED: "stop",
    Status.FINISHED_LENGTH_CAPPED: "length",
    Status.FINISHED_ABORTED: "abort",
    Status.FINISHED_ERROR: "error",
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request generates, as far as the fake model cares."""

    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_text: bool = False
    end_at_once: bool = False
    """The end token is biased to win, as soon as ``min_tokens`` allows."""


@dataclass(slots=True)
class Output:
    """One step's news of a request. ``error`` is set when the engine died."""

    samples: list[Sample]
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request's state in the scheduler.

    ``block_ids`` are its blocks in order, the first ``local_hit_blocks`` of
    them found in the local prefix cache. Positions below
    ``num_computed_tokens`` have their KV values in the blocks (while
    WAITING_FOR_REMOTE_KVS: will have).
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str = ""
    status: Status = Status.WAITING
    block_ids: list[int] = field(default_factory=list)
    local_hit_blocks: int = 0
    num_computed_tokens: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    text: str = ""
    sent_text_chars: int = 0
    stop_reason: int | str | None = None
    cached_tokens: int | None = None
    remote_cached_tokens: int | None = None
    num_preemptions: int = 0
    outputs: asyncio.Queue[Output] = field(default_factory=asyncio.Queue)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt, in tokens."""
        return len(self.prompt_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """Prompt and answer so far."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        """Length of prompt and answer so far, in tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def find_stop_text(self) -> str | None:
        """The stop text that ``text`` now contains, which is cut there."""
        sampling = self.sampling
        if len(self.output_token_ids) > sampling.min_tokens:
            for stop in sampling.stop:
                at = self.text.find(stop)
                if at >= 0:
                    self.text = self.text[: at + (len(stop) if sampling.include_stop_text else 0)]
                    return stop
        return None

    @property
    def reported_cached_tokens(self) -> int | None:
        """What usage calls cached: on decode what prefill had cached, as in vLLM 0.32."""
        return (
            self.cached_tokens if self.remote_cached_tokens is None else self.remote_cached_tokens
        )

    def take_text(self, *, finished: bool) -> str:
        """Text that was not given out yet, less what may become a stop text."""
        held_back = 0
        if not finished and not self.sampling.include_stop_text:
            held_back = max((len(stop) for stop in self.sampling.stop), default=1) - 1
        end = max(self.sent_text_chars, len(self.text) - held_back)
        delta = self.text[self.sent_text_chars : end]
        self.sent_text_chars = end
        return delta
