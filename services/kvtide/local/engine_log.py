"""What a starting vLLM engine is busy with, told from its log."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_FIRST_STAGE = "importing vLLM"
# In the order in which they come; checked on vLLM 0.32. A line that a later version words
# differently only makes the progress display less precise.
_STAGES = (
    ("non-default args", "reading the model's configuration"),
    ("Initializing a V1 LLM engine", "starting the engine core"),
    ("Starting to load model", "loading the weights"),
    ("Initializing NIXL worker", "allocating the KV cache"),
    ("Registering KV_Caches", "registering the KV cache with NIXL"),
    ("Supported tasks", "opening its HTTP endpoint"),
    ("Application startup complete", "joining the fleet"),
)


def start_stage(lines: Iterable[str]) -> str:
    """The stage that the last of these log lines tell of."""
    text = "\n".join(lines)
    reached = [stage for marker, stage in _STAGES if marker in text]
    return reached[-1] if reached else _FIRST_STAGE
