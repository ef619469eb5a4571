"""The connector's settings: environment variables, since vLLM owns the command line."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ENV_REGISTRY = "KVTIDE_ENGINE_REGISTRY"
ENV_HEALTH = "KVTIDE_ENGINE_HEALTH"
ENV_URL = "KVTIDE_ENGINE_URL"
ENV_NODE_ID = "KVTIDE_ENGINE_NODE_ID"

_KNOWN = frozenset((ENV_REGISTRY, ENV_HEALTH, ENV_URL, ENV_NODE_ID))


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How one engine finds its fleet, and how the fleet finds it."""

    #: ``host:port`` of the block-lease registry.
    registry: str
    #: ``host:port`` of node health; the registry's address unless set.
    health: str
    #: Base URL of this engine's OpenAI endpoint, as routers reach it.
    url: str
    #: Name of this engine, stable across restarts; the URL's host and port unless set.
    node_id: str

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None
    ) -> EngineSettings | None:
        """Read ``KVTIDE_ENGINE_*``; None when no registry is named.

        Raises ValueError naming the variable that is missing, malformed or unknown.
        """
        env = os.environ if environment is None else environment
        for name in env:
            if name.startswith("KVTIDE_ENGINE_") and name not in _KNOWN:
                known = ", ".join(sorted(_KNOWN))
                msg = f"unknown environment variable {name}; the connector knows {known}"
                raise ValueError(msg)
        registry = env.get(ENV_REGISTRY, "")
        if not registry:
            return None
        url = env.get(ENV_URL, "").rstrip("/")
        if not url.startswith(("http://", "https://")):
            msg = (
                f"{ENV_URL} must be this engine's base URL as routers reach it, such as "
                f"http://{socket.gethostname()}:8100, got {url!r}"
            )
            raise ValueError(msg)
        health = env.get(ENV_HEALTH, "") or registry
        for name, address in ((ENV_REGISTRY, registry), (ENV_HEALTH, health)):
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit():
                msg = f"{name} must be host:port, got {address!r}"
                raise ValueError(msg)
        node_id = env.get(ENV_NODE_ID, "") or url.partition("://")[2]
        return cls(registry=registry, health=health, url=url, node_id=node_id)
