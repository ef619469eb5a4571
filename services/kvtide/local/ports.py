"""TCP ports on loopback: finding free ones, and seeing that they are free again."""

from __future__ import annotations

import random
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LOOPBACK = "127.0.0.1"

# Below the range from which Linux takes the local end of outgoing connections (32768 and up): a
# port from here stays ours to listen on again after a restart.
_FIRST_PORT = 20_000
_LAST_PORT = 32_000

_SETTLE_INTERVAL_S = 0.05


class PortError(Exception):
    """No port to be had, or one that is still taken; the message names it."""


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """True when a server could listen there now."""
    with socket.socket() as probe:
        # Like every server: connections that linger after a restart do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # Two sockets that may reuse an address can both bind; only one of them can listen.
            probe.listen(1)
        except OSError:
            return False
    return True


def pick_free(count: int, taken: Iterable[int] = ()) -> list[int]:
    """`count` different ports, free now and none of them in `taken`.

    Raises PortError when there are not that many.
    """
    avoided = set(taken)
    picked: list[int] = []
    candidates = list(range(_FIRST_PORT, _LAST_PORT))
    # At random, so that two test runs that start together rarely want the same.
    random.shuffle(candidates)
    for port in candidates:
        if len(picked) == count:
            break
        if port not in avoided and is_free(port):
            picked.append(port)
    if len(picked) < count:
        raise PortError(f"only {len(picked)} of {count} ports between 20000 and 32000 are free")
    return picked


def wait_free(ports: Iterable[int], timeout_s: float) -> list[int]:
    """Waits for ports to be let go; returns those still taken when the time is up."""
    deadline_s = time.monotonic() + timeout_s
    taken = list(ports)
    while True:
        taken = [port for port in taken if not is_free(port)]
        if not taken or time.monotonic() >= deadline_s:
            return taken
        time.sleep(_SETTLE_INTERVAL_S)
