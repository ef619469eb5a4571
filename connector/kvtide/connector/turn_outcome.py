"""What became of one prompt on the prefill engine, in the form the router reads. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtide.connector.readback import (
    READ_DONE,
    READ_NOT,
    READ_UNKNOWN,
    REUSE_BELOW_THRESHOLD,
    REUSE_CACHED,
    REUSE_PREEMPTED,
    REUSE_PULLED,
    REUSE_TRANSFER_FAILED,
)


@dataclass(slots=True)
class Readback:
    """One request's readback as it goes on.

    ``reason`` is the plan's; ``handle_tokens`` what the handle covered and
    ``verified_tokens`` what of it was proven; ``cached_tokens`` what prefill had
    itself; ``loading_tokens`` what vLLM set out to load.
    """

    reason: str
    handle_tokens: int = 0
    verified_tokens: int = 0
    cached_tokens: int = 0
    loading_tokens: int = 0
    notified: bool = False
    failed: bool = False
    lost_load: bool = False

    def started(self, external_tokens: int) -> None:
        """The engine queued the read (of 0 tokens: only the notification that frees)."""
        self.loading_tokens = external_tokens
        self.notified = True

    def started_over(self) -> None:
        """The engine matches the prompt anew (failed read, preemption): what was loaded is gone."""
        self.lost_load = self.lost_load or self.loading_tokens > 0
        self.loading_tokens = 0


def outcome_params(
    readback: Readback, *, prompt_tokens: int, prompt_digest: str, threshold_tokens: int
) -> dict[str, Any]:
    """The ``kvtide`` entry of a finished prefill request's ``kv_transfer_params``.

    Token counts add up: pulled + cached + recomputed = prompt. The last prompt
    token is always computed, since its output is what prefill is for.
    """
    pulled = 0 if readback.failed else readback.loading_tokens
    cached = min(readback.cached_tokens, prompt_tokens - 1)
    pulled = max(0, min(pulled, prompt_tokens - 1 - cached))
    if readback.failed:
        reuse, read = REUSE_TRANSFER_FAILED, READ_UNKNOWN
    elif pulled:
        reuse, read = REUSE_PULLED, READ_DONE
    elif readback.lost_load:
        reuse, read = REUSE_PREEMPTED, READ_DONE
    elif readback.notified:
        missing = readback.verified_tokens - readback.cached_tokens
        reuse = REUSE_BELOW_THRESHOLD if missing > 0 else REUSE_CACHED
        read = READ_DONE
    else:
        reuse, read = readback.reason, READ_NOT
    return {
        "prompt_tokens": prompt_tokens,
        "pulled_tokens": pulled,
        "cached_tokens": cached,
        "recomputed_tokens": prompt_tokens - pulled - cached,
        "handle_tokens": readback.handle_tokens,
        "verified_tokens": readback.verified_tokens,
        "kv_recompute_threshold_tokens": threshold_tokens,
        "reuse": reuse,
        "read": read,
        "prompt_digest": prompt_digest,
    }
