"""Tasks that wait for something to happen to a key."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

_Key = TypeVar("_Key")


class KeyedWaits(Generic[_Key]):
    """Lets any number of tasks wait for a key; remembers nothing that nobody waits for."""

    def __init__(self) -> None:
        self._waiting: dict[_Key, set[asyncio.Future[None]]] = {}

    async def wait(self, key: _Key, timeout_s: float) -> bool:
        """Wait until ``wake(key)``: True; or for ``timeout_s`` seconds: False."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return False
        finally:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(future)
                if not waiting:
                    del self._waiting[key]
        return True

    def wake(self, key: _Key) -> None:
        """End the waits of everybody who waits for ``key`` now."""
        for future in self._waiting.pop(key, ()):
            if not future.done():
                future.set_result(None)

    def wake_all(self) -> None:
        """End all waits."""
        for key in list(self._waiting):
            self.wake(key)
