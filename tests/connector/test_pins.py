"""The decode engine's own record of what it pins."""

from __future__ import annotations

from kvtide.connector.handle import KvHandle
from kvtide.connector.pins import EndCause, Pin, PinEnded, PinTable, TurnId


def pin(request_id: str, blocks: int = 2) -> Pin:
    """A pin of ``blocks`` blocks of 4 tokens."""
    ids = tuple(range(blocks))
    handle = KvHandle("e", request_id, "h", 1, (ids,), blocks * 4, 4, 100.0)
    return Pin(TurnId("t", "c", 1), handle, list(range(blocks * 4)), deadline_s=95.0, ttl_s=60.0)


def test_budget_counts_blocks_until_they_are_freed() -> None:
    """Pins take room from the budget, and give it back when they end, however they end."""
    table = PinTable(budget_blocks=5)
    table.add(pin("a", 2))
    table.add(pin("b", 2))
    assert table.pinned_blocks == 4
    assert table.has_room_for(1)
    assert not table.has_room_for(2)
    table.end("a", EndCause.READ)
    assert table.has_room_for(3)


def test_each_pin_ends_once() -> None:
    """A second end of one pin is no event: the engine frees it once and reports it once."""
    table = PinTable(10)
    table.add(pin("a"))
    table.wait_for_events(0)
    assert table.end("a", EndCause.READ)
    assert not table.end("a", EndCause.EXPIRED)
    assert table.wait_for_events(0) == [PinEnded("a", EndCause.READ)]
    assert table.pinned_blocks == 0


def test_new_stream_starts_from_all_pins_and_no_older_event() -> None:
    """After a reconnect the registry gets what is pinned now, and nothing that contradicts it."""
    table = PinTable(10)
    kept, gone = pin("kept"), pin("gone")
    table.add(kept)
    table.add(gone)
    table.end("gone", EndCause.EXPIRED)
    assert table.open_stream() == [kept]
    assert table.wait_for_events(0) == []


def test_inventory_in_mid_stream_comes_after_the_events_before_it() -> None:
    """A later inventory loses no event: those that came before it are delivered with it, first."""
    table = PinTable(10)
    first = pin("a")
    table.add(first)
    table.end("a", EndCause.RELEASED)
    second = pin("b")
    table.add(second)
    assert table.snapshot() == ([first, PinEnded("a", EndCause.RELEASED), second], [second])


def test_release_of_something_unknown_is_answered() -> None:
    """The registry hears "released" for a pin that is long gone, so that it stops asking."""
    table = PinTable(10)
    table.add(pin("a"))
    table.wait_for_events(0)
    assert not table.answer_release_of_unknown("a")
    assert table.answer_release_of_unknown("b")
    assert table.wait_for_events(0) == [PinEnded("b", EndCause.RELEASED)]


def test_fingerprint_covers_the_pinned_tokens() -> None:
    """The fingerprint is of exactly the tokens whose KV the handle points at."""
    made = pin("a", 3).fingerprint()
    assert (made.token_count, made.block_size_tokens) == (12, 4)
