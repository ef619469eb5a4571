"""The KV block pool: ids, reference counts, values, and the local prefix cache."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.fakes.engine.model import Values


@dataclass(frozen=True, slots=True)
class PoolState:
    """The pool at one moment, as tests look at it."""

    total_blocks: int
    free_blocks: int
    pinned_requests: int
    """Finished requests whose blocks are kept for a reader."""
    pinned_blocks: int
    running_requests: int
    waiting_requests: int


class BlockPool:
    """Blocks as vLLM keeps them: block 0 reserved, freed blocks reused oldest first.

    A freed block keeps its values, and its place in the prefix cache, until
    it is handed out again. That is what makes a late read dangerous.
    """

    def __init__(self, block_count: int, block_size_tokens: int, *, caching: bool) -> None:
        self.block_size_tokens = block_size_tokens
        self.usable_blocks = block_count - 1
        self._caching = caching
        self._values = np.zeros((block_count, block_size_tokens), dtype=np.uint64)
        self._references = [0] * block_count
        self._hashes: list[bytes | None] = [None] * block_count
        self._cached: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, block_count))

    @property
    def free_blocks(self) -> int:
        """Blocks that may be handed out, cached ones included."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Hand out ``count`` blocks with one reference each, or None if too few are free."""
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            block_id, _unused = self._free.popitem(last=False)
            self._evict(block_id)
            self._references[block_id] = 1
            taken.append(block_id)
        return taken

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks found in the prefix cache."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                del self._free[block_id]
            self._references[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Give one reference back; the tail of a request is reused first."""
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            assert self._references[block_id] >= 0, f"block {block_id} freed twice"
            if self._references[block_id] == 0:
                self._free[block_id] = None

    def is_cached(self, block_id: int) -> bool:
        """Whether the block is in the prefix cache."""
        return self._hashes[block_id] is not None

    def cache(self, block_ids: Sequence[int], token_ids: Sequence[int], salt: str) -> None:
        """Enter the full blocks of a request into the prefix cache, by their tokens."""
        if not self._caching:
            return
        for block_id, digest in zip(block_ids, self._chain(token_ids, salt), strict=False):
            if self._hashes[block_id] is None and digest not in self._cached:
                self._hashes[block_id] = digest
                self._cached[digest] = block_id

    def lookup(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """Cached blocks for the longest prefix of ``token_ids`` in whole blocks."""
        found: list[int] = []
        if self._caching:
            for digest in self._chain(token_ids, salt):
                block_id = self._cached.get(digest)
                if block_id is None:
                    break
                found.append(block_id)
        return found

    def values(self, block_ids: Sequence[int], token_count: int) -> Values:
        """The values of positions 0 … token_count-1, as the blocks hold them now."""
        flat: Values = self._values[list(block_ids)].reshape(-1)[:token_count]
        return flat

    def store(self, block_ids: Sequence[int], start: int, values: Values) -> None:
        """Write the values of positions start … start+len-1."""
        positions = np.arange(start, start + len(values))
        blocks = np.asarray(block_ids)[positions // self.block_size_tokens]
        self._values[blocks, positions % self.block_size_tokens] = values

    def read_raw(self, block_ids: Sequence[int]) -> bytes:
        """What a remote READ gets: whole blocks, whoever's they are by now.

        Raises IndexError for an id outside the pool.
        """
        return bytes(self._values[list(block_ids)].tobytes())

    def write_raw(self, block_ids: Sequence[int], data: bytes) -> None:
        """Put whole blocks that a READ brought into place."""
        self._values[list(block_ids)] = np.frombuffer(data, dtype=np.uint64).reshape(
            len(block_ids), self.block_size_tokens
        )

    def _evict(self, block_id: int) -> None:
        digest = self._hashes[block_id]
        if digest is not None:
            del self._cached[digest]
            self._hashes[block_id] = None

    def _chain(self, token_ids: Sequence[int], salt: str) -> Iterable[bytes]:
        digest = salt.encode()
        size = self.block_size_tokens
        for end in range(size, len(token_ids) + 1, size):
            block = np.array(token_ids[end - size : end], dtype=np.uint32).tobytes()
            digest = hashlib.blake2b(digest + block, digest_size=16).digest()
            yield digest
