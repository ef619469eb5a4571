"""The digest chain that proves whose tokens a handle's blocks were computed from."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.connector.fingerprint import (
    ALGORITHM,
    DIGEST_BYTES,
    Fingerprint,
    fingerprint_of,
    prompt_digest,
    verified_token_count,
)

BLOCK = 4
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_chain_is_the_published_one() -> None:
    """The digests are those of the documented chain, so that other programs can compute them."""
    packed = b"".join(i.to_bytes(4, "little") for i in (1, 2, 3, 4, 5))
    first = hashlib.blake2b(packed[:16], digest_size=16).digest()
    second = hashlib.blake2b(first + packed[16:], digest_size=16).digest()
    assert fingerprint_of([1, 2, 3, 4, 5], BLOCK).digests == first + second


@given(tokens)
def test_same_tokens_verify_whole(ids: list[int]) -> None:
    """A prompt that equals the fingerprinted tokens is verified to the last one."""
    assert verified_token_count(fingerprint_of(ids, BLOCK), ids) == len(ids)


@given(tokens, tokens)
def test_extended_history_verifies_whole(ids: list[int], more: list[int]) -> None:
    """A prompt that goes on after the history verifies all of it, its partial block included."""
    assert verified_token_count(fingerprint_of(ids, BLOCK), ids + more) == len(ids)


@given(st.lists(st.integers(0, 999), min_size=1, max_size=40), st.data())
def test_edited_history_verifies_whole_blocks_before_the_edit(
    ids: list[int], data: st.DataObject
) -> None:
    """After one edited token, exactly the whole blocks before it are verified."""
    position = data.draw(st.integers(0, len(ids) - 1))
    edited = [*ids]
    edited[position] += 1
    verified = verified_token_count(fingerprint_of(ids, BLOCK), edited)
    assert verified == position // BLOCK * BLOCK


@given(st.lists(st.integers(0, 999), min_size=1, max_size=40), st.data())
def test_shorter_prompt_verifies_whole_blocks(ids: list[int], data: st.DataObject) -> None:
    """A prompt that ends inside the history verifies its whole blocks, never a partial one."""
    length = data.draw(st.integers(0, len(ids) - 1))
    verified = verified_token_count(fingerprint_of(ids, BLOCK), ids[:length])
    assert verified == length // BLOCK * BLOCK


@given(tokens, tokens)
def test_verified_tokens_are_always_a_common_prefix(mine: list[int], theirs: list[int]) -> None:
    """Whatever two histories are, no token beyond their common prefix is ever verified."""
    verified = verified_token_count(fingerprint_of(theirs, BLOCK), mine)
    assert mine[:verified] == theirs[:verified]


def test_seed_separates_adapters() -> None:
    """The same tokens under another adapter verify nothing: their KV differs."""
    fingerprint = fingerprint_of([1] * 8, BLOCK, seed=b"lora:a")
    assert verified_token_count(fingerprint, [1] * 8, seed=b"lora:b") == 0
    assert prompt_digest([1], b"lora:a") != prompt_digest([1], b"lora:b")


def test_unknown_algorithm_verifies_nothing() -> None:
    """A fingerprint of a newer algorithm costs a recompute, not an error."""
    known = fingerprint_of([1] * 8, BLOCK)
    newer = Fingerprint("sha3-32", BLOCK, 8, known.digests)
    assert verified_token_count(newer, [1] * 8) == 0


@pytest.mark.parametrize(
    ("block_size", "count", "digests", "named"),
    [
        (0, 4, b"", "block_size_tokens"),
        (4, -1, b"", "token_count"),
        (4, 8, b"\0" * DIGEST_BYTES, "digest bytes"),
    ],
)
def test_inconsistent_fingerprint_is_refused(
    block_size: int, count: int, digests: bytes, named: str
) -> None:
    """A fingerprint whose lengths do not fit together can't be built; the error names what."""
    with pytest.raises(ValueError, match=named):
        Fingerprint(ALGORITHM, block_size, count, digests)
