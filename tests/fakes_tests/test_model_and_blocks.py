"""The fake model and block pool: what makes a wrong read show."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fakes.engine.blocks import BlockPool
from tests.fakes.engine.model import compute, sample

_NOTHING = np.empty(0, dtype=np.uint64)


def test_the_same_history_gives_the_same_values_however_it_is_split() -> None:
    """KV computed in two parts, by two engines, equals KV computed at once."""
    tokens = list(range(50))
    whole = compute(_NOTHING, tokens)
    head = compute(_NOTHING, tokens[:17])
    assert np.array_equal(whole, np.concatenate([head, compute(head, tokens[17:])]))


@pytest.mark.parametrize("position", [0, 24, 49])
def test_every_single_value_matters(position: int) -> None:
    """One wrong KV value, anywhere, changes the next token's log probability."""
    values = compute(_NOTHING, list(range(50)))
    before = sample(values)
    values[position] += np.uint64(1)
    assert sample(values).logprob != before.logprob


def test_swapped_blocks_show() -> None:
    """The right values in the wrong order are wrong."""
    values = compute(_NOTHING, list(range(32)))
    swapped = np.concatenate([values[16:], values[:16]])
    assert sample(swapped) != sample(values)


def test_wrong_context_spoils_what_is_computed_after_it() -> None:
    """Tokens prefilled behind a stale prefix get other values than behind the right one."""
    stale = compute(_NOTHING, [1, 2, 3])
    right = compute(_NOTHING, [1, 2, 4])
    assert not np.array_equal(compute(stale, [5]), compute(right, [5]))


def test_a_freed_block_keeps_its_values_until_it_is_handed_out_again() -> None:
    """A late READ of a freed block gets the old values, and after reuse another's."""
    pool = BlockPool(3, 4, caching=False)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.store(blocks, 0, np.arange(8, dtype=np.uint64))
    before = pool.read_raw(blocks)
    pool.free(blocks)
    assert pool.read_raw(blocks) == before
    reused = pool.allocate(2)
    assert reused is not None
    pool.store(reused, 0, np.arange(100, 108, dtype=np.uint64))
    assert pool.read_raw(blocks) != before


def test_block_zero_is_never_handed_out() -> None:
    """As in vLLM, id 0 stands for no block."""
    pool = BlockPool(5, 4, caching=False)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.allocate(1) is None


def test_freeing_twice_fails() -> None:
    """A double free is a bug of the engine, and stops it."""
    pool = BlockPool(3, 4, caching=False)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_the_prefix_cache_finds_whole_blocks_of_the_same_prefix() -> None:
    """A lookup ends at the first block whose tokens, or anything before them, differ."""
    pool = BlockPool(10, 4, caching=True)
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.cache(blocks, list(range(10)), "")
    assert pool.lookup(list(range(12)), "") == blocks[:2]
    assert pool.lookup([*range(4), 99, 5, 6, 7], "") == blocks[:1]
    assert pool.lookup([99, *range(1, 12)], "") == []
    assert pool.lookup(list(range(12)), "another tenant's salt") == []


def test_a_cached_block_in_use_is_shared_and_a_reused_one_is_forgotten() -> None:
    """References keep a block; handing it out again removes it from the cache."""
    pool = BlockPool(3, 4, caching=True)
    blocks = pool.allocate(2)
    assert blocks is not None
    pool.cache(blocks, list(range(8)), "")
    pool.free(blocks)
    assert pool.free_blocks == 2
    pool.touch(pool.lookup(list(range(4)), ""))
    assert pool.free_blocks == 1
    assert pool.allocate(1) == blocks[1:]
    assert pool.lookup(list(range(8)), "") == blocks[:1]
