"""Waiting for something to become true, without asserting how long it took."""

from __future__ import annotations

import asyncio
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


async def eventually(look: Callable[[], Any], *, timeout_s: float = 20.0) -> Any:
    """Call ``look``, and await what it gives, until that is something true; return it.

    Raises AssertionError with the last value when that takes longer than
    ``timeout_s``, which only bounds how long a failing test hangs.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while True:
        found = look()
        value = await found if isawaitable(found) else found
        if value:
            return value
        if asyncio.get_running_loop().time() > deadline_s:
            msg = f"still {value!r} after {timeout_s} s"
            raise AssertionError(msg)
        await asyncio.sleep(0.01)
