"""Chained digests of token prefixes: how prefill proves that a handle is its prompt's.

A handle says *where* KV blocks lie; a fingerprint says *whose tokens* they were
computed from. Upstream vLLM trusts the handle's length alone and answers with
another history's KV, HTTP 200, when the history was edited. kvtide compares
digests first (contract L8).

The chain: ``digest[i] = BLAKE2b-128(digest[i-1] || token ids of block i as
little-endian uint32)``, with the seed in place of ``digest[-1]``. A digest thus
covers everything up to and including its block, and equal digests mean equal
prefixes up to a collision of probability 2**-128.

Pure: no I/O, no protobuf, no vLLM.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ALGORITHM = "blake2b-16"
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Digests of the first ``token_count`` tokens, one for each block.

    The last digest may cover a partial block; ``digests`` holds
    ``ceil(token_count / block_size_tokens)`` of them, ``DIGEST_BYTES`` each.
    """

    algorithm: str
    block_size_tokens: int
    token_count: int
    digests: bytes

    def __post_init__(self) -> None:
        """Raise ValueError when the lengths do not fit together."""
        if self.block_size_tokens <= 0:
            msg = f"block_size_tokens must be positive, got {self.block_size_tokens}"
            raise ValueError(msg)
        if self.token_count < 0:
            msg = f"token_count must not be negative, got {self.token_count}"
            raise ValueError(msg)
        expected = block_count(self.token_count, self.block_size_tokens) * DIGEST_BYTES
        if self.algorithm == ALGORITHM and len(self.digests) != expected:
            msg = (
                f"{self.token_count} tokens in blocks of {self.block_size_tokens} need "
                f"{expected} digest bytes, got {len(self.digests)}"
            )
            raise ValueError(msg)


def block_count(token_count: int, block_size_tokens: int) -> int:
    """Blocks that ``token_count`` tokens occupy, the partial last one included."""
    return -(-token_count // block_size_tokens)


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as little-endian uint32. Raises OverflowError for ids outside 32 bits."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _chain(packed: bytes, block_size_tokens: int, seed: bytes) -> Iterable[bytes]:
    stride = 4 * block_size_tokens
    digest = seed
    for start in range(0, len(packed), stride):
        digest = hashlib.blake2b(
            digest + packed[start : start + stride], digest_size=DIGEST_BYTES
        ).digest()
        yield digest


def fingerprint_of(
    token_ids: Iterable[int], block_size_tokens: int, seed: bytes = b""
) -> Fingerprint:
    """Fingerprint a token sequence.

    ``seed`` is whatever else the KV depends on besides the tokens, such as the
    name of a LoRA adapter; empty for the base model.
    """
    packed = pack_tokens(token_ids)
    return Fingerprint(
        ALGORITHM,
        block_size_tokens,
        len(packed) // 4,
        b"".join(_chain(packed, block_size_tokens, seed)),
    )


def verified_token_count(
    fingerprint: Fingerprint, token_ids: Sequence[int], seed: bytes = b""
) -> int:
    """How many leading tokens of ``token_ids`` the fingerprint proves.

    All of the fingerprint's tokens when every digest matches, the partial last
    block included. Otherwise the longest matching prefix of whole blocks, which
    may be 0. Returns 0 for an unknown algorithm.
    """
    if fingerprint.algorithm != ALGORITHM:
        return 0
    size = fingerprint.block_size_tokens
    usable = min(len(token_ids), fingerprint.token_count)
    packed = pack_tokens(token_ids[:usable])
    verified = 0
    for index, digest in enumerate(_chain(packed, size, seed)):
        covered = min((index + 1) * size, usable)
        whole = covered == (index + 1) * size
        # A partial block counts only as the fingerprint's own last one: any
        # other partial block was hashed over fewer tokens than its digest.
        if not whole and covered != fingerprint.token_count:
            break
        offset = index * DIGEST_BYTES
        if fingerprint.digests[offset : offset + DIGEST_BYTES] != digest:
            break
        verified = covered
    return verified


def prompt_digest(token_ids: Iterable[int], seed: bytes = b"") -> str:
    """One digest over a whole prompt, in hex: what decode compares with prefill's."""
    return hashlib.blake2b(seed + pack_tokens(token_ids), digest_size=DIGEST_BYTES).hexdigest()
