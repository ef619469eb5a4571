"""What node health offers, and the values that travel through it.

Plain Python. ``LocalNodeHealth`` and ``GrpcNodeHealth`` implement
``NodeHealth``, and a caller cannot tell which one it has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from kvtide.runtime.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

MAX_ID_CHARS = 256


class NodeRole(StrEnum):
    """Which leg of a turn an engine serves."""

    PREFILL = "prefill"
    DECODE = "decode"


class NodeState(StrEnum):
    """What node health knows of an engine."""

    STARTING = "starting"
    """Alive, but its HTTP endpoint does not answer yet."""
    READY = "ready"
    SUSPECT = "suspect"
    """Heartbeats are missing or the stream broke: no new turns, leases kept."""
    DOWN = "down"
    """Silent for longer than the down timeout."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """What an engine is; constant for one start of it.

    Raises ``InvalidArgument`` for an empty or too long ``node_id``, ``epoch`` or
    ``engine_url``.
    """

    node_id: str
    """Stable across restarts, 1 to 256 characters."""
    epoch: str
    """Random for each start."""
    role: NodeRole
    engine_url: str
    """Base URL of the OpenAI endpoint, as routers reach it, without a path."""
    models: tuple[str, ...] = ()
    vllm_version: str = ""
    block_size_tokens: int = 0
    block_count: int = 0
    """Blocks in the KV pool."""
    kv_recompute_threshold_tokens: int = 0
    """Below this many missing tokens prefill recomputes instead of pulling."""
    decoder_kv_blocks_ttl_s: float = 0.0
    """Retention of a finished turn's blocks, in seconds."""
    max_model_len_tokens: int = 0
    """Prompt plus answer, in tokens."""

    def __post_init__(self) -> None:
        for name, value in (("node_id", self.node_id), ("epoch", self.epoch)):
            if not 1 <= len(value) <= MAX_ID_CHARS:
                raise InvalidArgument(
                    "invalid_id",
                    f"{name} must have 1 to {MAX_ID_CHARS} characters, got {len(value)}",
                )
        if not self.engine_url.startswith(("http://", "https://")):
            raise InvalidArgument(
                "invalid_engine_url",
                f"engine_url must start with http:// or https://, got {self.engine_url!r}",
            )


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """How busy an engine was at its last heartbeat."""

    free_blocks: int = 0
    pinned_blocks: int = 0
    """Blocks kept for leases."""
    running_requests: int = 0
    waiting_requests: int = 0
    last_step_age_s: float = 0.0
    """Age of the last engine step, in seconds."""


@dataclass(frozen=True, slots=True)
class Node:
    """One engine, as node health sees it now."""

    info: NodeInfo
    state: NodeState
    load: NodeLoad = field(default_factory=NodeLoad)
    silent_s: float = 0.0
    """Since the last heartbeat, by the service's clock, in seconds, when this
    value was made."""


class NodeHealth(Protocol):
    """Which engines are alive, and what they are."""

    async def list_nodes(self) -> list[Node]:
        """The whole fleet, sorted by node id.

        Raises ``Unavailable`` when the service cannot be reached and no view of
        the fleet was ever received from it.
        """
        ...

    def watch(self) -> AsyncGenerator[list[Node], None]:
        """The whole fleet first, then the whole fleet again after each change.

        A change is a node that appears, goes, or changes its state or epoch; new
        loads follow within a second. Changes that come faster than the caller
        reads are coalesced: what comes next is the fleet as it is by then. The
        generator ends only when the health service is stopped in this process;
        across a network it reconnects by itself and meanwhile yields nothing.
        Leave it early through ``contextlib.aclosing``.
        """
        ...
