"""Network addresses as people write them: "host:port"."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

__all__ = ["DialAddress", "ListenAddress", "join_address", "split_address"]

_MAX_PORT = 65_535


def split_address(address: str) -> tuple[str, int]:
    """Split "host:port" into its parts; an IPv6 host stands in square brackets.

    Raises ValueError that says what is wrong.
    """
    host, colon, port = address.rpartition(":")
    if not colon:
        message = 'has no port; write "host:port"'
        raise ValueError(message)
    if not host:
        message = 'has no host; write "127.0.0.1:port", or "0.0.0.0:port" for every interface'
        raise ValueError(message)
    bracketed = host.startswith("[") and host.endswith("]")
    if "//" in host or "/" in port:
        message = 'is a URL; write "host:port" without scheme and path'
        raise ValueError(message)
    if ":" in host and not bracketed:
        message = 'looks like IPv6 without brackets; write "[host]:port"'
        raise ValueError(message)
    if any(character.isspace() for character in host):
        message = "has a space in its host"
        raise ValueError(message)
    if not (port.isascii() and port.isdigit() and int(port) <= _MAX_PORT):
        message = f"has the port {port!r}; a port is a number from 0 to {_MAX_PORT}"
        raise ValueError(message)
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen_address(address: str) -> str:
    split_address(address)
    return address


def _dial_address(address: str) -> str:
    if address and split_address(address)[1] == 0:
        message = "has the port 0, which nothing can connect to"
        raise ValueError(message)
    return address


ListenAddress = Annotated[str, AfterValidator(_listen_address)]
"""Where a server listens; port 0 lets the system choose one."""

DialAddress = Annotated[str, AfterValidator(_dial_address)]
"""Where a client connects to; empty means "in this process"."""
