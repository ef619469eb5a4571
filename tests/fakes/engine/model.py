"""The fake engine's model: what it computes depends on KV values, not on tokens.

Each position has a KV value, a number computed from the token there and from
*all* KV values before it, as they lie in the request's blocks. The next token
is drawn from all of them. So a block that is stale, misplaced or reused gives
another answer and other logprobs, as it does in a real model, while the same
history always gives the same answer, whichever engine computed which part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tests.fakes.engine.tokens import END_ID

if TYPE_CHECKING:
    from collections.abc import Sequence

Values = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_POSITION_SALT = 0x9E3779B97F4A7C15
_TOKEN_SALT = 0xC2B2AE3D27D4EB4F
_SAMPLE_SALT = 0x165667B19E3779F9
_ALPHABET = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ."
_MAX_TOP = 20

_WEIGHTS = np.arange(1, 2 * 65_536, 2, dtype=np.uint64) * np.uint64(_POSITION_SALT)


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled token with its log probability, and the likeliest ones, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def _mix(number: int) -> int:
    """splitmix64: 64 bits in, 64 well-mixed bits out."""
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)


def attend(values: Values) -> int:
    """Fold the KV values of positions 0 … n-1 into what the next position sees."""
    return int((values * _WEIGHTS[: len(values)]).sum(dtype=np.uint64))


def compute(context: Values, tokens: Sequence[int]) -> Values:
    """KV values of ``tokens``, which follow positions whose values are ``context``."""
    seen = attend(context)
    position = len(context)
    computed = np.empty(len(tokens), dtype=np.uint64)
    for index, token in enumerate(tokens):
        value = _mix(seen ^ (token + 1) * _TOKEN_SALT & _MASK ^ position)
        computed[index] = value
        seen = (seen + value * int(_WEIGHTS[position])) & _MASK
        position += 1
    return computed


def sample(context: Values, *, eos_interval: int = 0) -> Sample:
    """The token after ``context``: greedy, whatever the temperature."""
    drawn = _mix(attend(context) ^ _SAMPLE_SALT)
    logprob = -0.01 - (drawn >> 40) % 1000 / 1000
    first = drawn % len(_ALPHABET)
    order = [*_ALPHABET[first:], *_ALPHABET[:first]]
    if eos_interval and (drawn >> 20) % eos_interval == 0:
        order.insert(0, END_ID)
    top = tuple((token, logprob - rank / 4) for rank, token in enumerate(order[:_MAX_TOP]))
    return Sample(top[0][0], logprob, top)
