"""The connector: what runs inside vLLM, on top of vLLM's own NIXL connector.

vLLM loads ``LeasedNixlConnector`` from here (``kv_connector_module_path``). It is
imported on first use, so that the pure parts (handle, fingerprint, readback,
pins) and the agent work where vLLM is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtide.connector.facade import LeasedNixlConnector

__all__ = ["LeasedNixlConnector"]


def __getattr__(name: str) -> Any:
    if name == "LeasedNixlConnector":
        from kvtide.connector.facade import LeasedNixlConnector

        return LeasedNixlConnector
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
