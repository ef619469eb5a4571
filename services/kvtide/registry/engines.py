"""Which engines there are, and which of their streams speaks for them.

Orderings (each is tested by name)

* The newest stream speaks. When an engine attaches again in the same epoch, the
  new stream replaces the old one, and whatever still comes out of the old one is
  ignored, its end included.
* A new epoch replaces the old one at once. Epochs are random and cannot be
  compared, so "new" means "not seen before on this node". A stream of an epoch
  that was replaced is a leftover of a dead engine and is refused while the newer
  one is attached; otherwise it is believed, so that an engine that was shut out
  by a leftover gets back in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvtide.registry.due import NEVER_S
from kvtide.runtime.errors import FailedPrecondition

REMEMBERED_EPOCHS = 16


@dataclass(slots=True, eq=False)
class Engine:
    """One node: the engine start that speaks for it now, and its stream."""

    node_id: str
    epoch: str
    stream_id: int | None = None
    """None while detached."""
    past_epochs: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED_EPOCHS))
    last_seen_s: float = 0.0
    filed_due_s: float = NEVER_S


class EngineTable:
    """All engines that are attached, or were not long ago."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}

    def get(self, node_id: str) -> Engine | None:
        """The engine of a node, attached or not."""
        return self._engines.get(node_id)

    def attach(
        self, node_id: str, epoch: str, stream_id: int, now_s: float
    ) -> tuple[Engine, str | None]:
        """Make a stream speak for a node.

        Returns the engine, and the epoch that this one replaced, if any. Raises
        ``FailedPrecondition`` for the stream of a replaced epoch.
        """
        replaced: str | None = None
        engine = self._engines.get(node_id)
        if engine is None:
            engine = self._engines[node_id] = Engine(node_id, epoch)
        elif engine.epoch != epoch:
            if epoch in engine.past_epochs and engine.stream_id is not None:
                raise FailedPrecondition(
                    "newer_epoch_attached",
                    f"node {node_id!r} has restarted: its epoch {engine.epoch!r} is attached and "
                    f"replaced {epoch!r}; give each engine a node id of its own",
                )
            if epoch in engine.past_epochs:
                engine.past_epochs.remove(epoch)
            engine.past_epochs.append(engine.epoch)
            replaced, engine.epoch = engine.epoch, epoch
        engine.stream_id = stream_id
        engine.last_seen_s = now_s
        return engine, replaced

    def speaks(self, node_id: str, stream_id: int) -> Engine | None:
        """The engine that a stream speaks for; None once it was replaced or detached."""
        engine = self._engines.get(node_id)
        return engine if engine is not None and engine.stream_id == stream_id else None

    def is_attached(self, node_id: str, epoch: str) -> bool:
        """Whether this very engine start has a stream now."""
        engine = self._engines.get(node_id)
        return engine is not None and engine.epoch == epoch and engine.stream_id is not None

    def forget(self, engine: Engine) -> None:
        """Drop an engine from memory."""
        del self._engines[engine.node_id]
