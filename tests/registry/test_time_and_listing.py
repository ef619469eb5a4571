"""Expiry in bulk, bounded memory, and pages of leases."""

from __future__ import annotations

import pytest

from kvtide.registry.due import NEVER_S, DueQueue
from kvtide.registry.ports import ConversationKey, LeaseQuery, LeaseState, ReadOutcome
from kvtide.runtime.errors import InvalidArgument, NotFound
from tests.registry.support import KEY, TTL_S, Driver, make_grant


class Item:
    def __init__(self, name: str) -> None:
        self.name = name
        self.filed_due_s = NEVER_S


def test_due_queue_moves_items_earlier_and_ignores_the_old_entry() -> None:
    """An item that was filed again for an earlier time comes up once, at that time."""
    queue: DueQueue[Item] = DueQueue()
    item = Item("a")
    queue.file(item, 10.0)
    queue.file(item, 5.0)
    queue.file(item, 7.0)
    assert queue.pop_due(4.9) is None
    assert queue.pop_due(5.0) is item
    assert queue.pop_due(10.0) is None
    assert len(queue) == 0


def test_due_queue_brings_up_everything_due_in_order() -> None:
    """Whatever the mixture of times, all that is due comes up, the earliest first."""
    queue: DueQueue[Item] = DueQueue()
    for name, due_s in (("c", 480.0), ("a", 30.0), ("d", 481.0), ("b", 30.5)):
        queue.file(Item(name), due_s)
    names = []
    while (item := queue.pop_due(480.0)) is not None:
        names.append(item.name)
    assert names == ["a", "b", "c"]


def test_mixed_ttls_all_expire_on_time() -> None:
    """A short lease granted behind a long one is not stranded by the sweep."""
    driver = Driver()
    driver.attach()
    ttls = [480.0, 30.0, 480.0, 31.0, 30.0, 600.0]
    for number, ttl_s in enumerate(ttls):
        key = ConversationKey("t", f"c{number}")
        driver.grant(driver.open(key).generation, f"r{number}", key=key, time_left_s=ttl_s)
    for now_s, gone in ((29.9, 0), (30.0, 2), (31.0, 3), (479.9, 3), (480.0, 5), (600.0, 6)):
        driver.now_s = now_s
        driver.sweep()
        assert len(driver.ends()) == gone


def test_the_sweep_is_bounded_and_says_when_more_is_due() -> None:
    """One sweep looks at no more than its limit; the next ones do the rest."""
    driver = Driver()
    driver.attach()
    for number in range(25):
        key = ConversationKey("t", f"c{number}")
        driver.grant(driver.open(key).generation, f"r{number}", key=key, time_left_s=30.0)
    ended = []
    more = True
    while more:
        effects, more = driver.table.sweep(30.0, limit=10)
        ended.append(len(effects))
    assert ended == [10, 10, 5]


def test_memory_is_bounded() -> None:
    """Ended leases, idle conversations, gone engines and their claims leave the record."""
    driver = Driver()
    for epoch in ("e1", "e2", "e3"):
        driver.attach(epoch=epoch)
        for number in range(10):
            key = ConversationKey(epoch, f"c{number}")
            driver.grant(driver.open(key).generation, f"r{number}", key=key, epoch=epoch)
            driver.open(key)
    driver.detach(epoch="e3")
    for _ in range(10):
        driver.advance(3600.0)
    book = driver.table._book
    assert (book.by_serial, book._by_claim, book._by_engine) == ({}, {}, {})
    assert driver.table._conversations == {}
    assert driver.table._engines._engines == {}
    assert len(driver.table._due) == 0


def test_a_busy_conversation_is_not_forgotten() -> None:
    """A conversation with a lease, or with a recent turn, stays however old it is."""
    driver = Driver()
    driver.attach()
    for _ in range(20):
        turn = driver.open()
        driver.settle(turn, ReadOutcome.NOT_READ)
        driver.grant(turn.generation)
        driver.advance(470.0)
    assert driver.open().claimed is not None


def test_ended_leases_stay_on_record_for_a_while() -> None:
    """How a lease ended can be asked for a minute, and not for ever."""
    driver = Driver()
    driver.held()
    driver.settle(driver.open(), ReadOutcome.READ)
    driver.advance(59.9)
    assert driver.lease().state is LeaseState.CONSUMED
    driver.advance(0.2)
    with pytest.raises(NotFound, match="conversation-1"):
        driver.lease()


def test_a_record_outlives_the_last_claim_on_it() -> None:
    """While a reader may still be at work a repeated grant is recognised, not offered as new."""
    driver = Driver()
    grant = driver.held()
    driver.open()
    driver.inventory()  # The engine says that it is gone, ...
    driver.advance(59.9)
    driver.inventory(grant)  # ... and then that it is not.
    assert driver.open().claimed is None


# ---- listings ----------------------------------------------------------------------------------


def filled(count: int) -> Driver:
    driver = Driver()
    driver.attach()
    for number in range(count):
        key = ConversationKey(f"tenant-{number % 2}", f"c{number}")
        driver.grant(driver.open(key).generation, f"r{number}", key=key)
    return driver


def names(driver: Driver, query: LeaseQuery) -> list[str]:
    page = driver.table.list_leases(query, driver.now_s)
    return [lease.key.conversation_id for lease in page.leases]


def test_newest_grant_comes_first() -> None:
    """A listing starts with the lease that was granted last."""
    assert names(filled(3), LeaseQuery()) == ["c2", "c1", "c0"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (LeaseQuery(tenant="tenant-0"), ["c4", "c2", "c0"]),
        (LeaseQuery(node_id="decode-1"), ["c4", "c3", "c2", "c1", "c0"]),
        (LeaseQuery(node_id="elsewhere"), []),
        (LeaseQuery(state=LeaseState.CLAIMED), ["c3"]),
        (LeaseQuery(state=LeaseState.HELD, tenant="tenant-1"), ["c1"]),
    ],
)
def test_filters(query: LeaseQuery, expected: list[str]) -> None:
    """Each filter narrows the listing, and all of them apply together."""
    driver = filled(5)
    driver.open(ConversationKey("tenant-1", "c3"))
    assert names(driver, query) == expected


def all_pages(driver: Driver, query: LeaseQuery) -> list[list[str]]:
    pages = []
    token = ""
    while True:
        page = driver.table.list_leases(
            LeaseQuery(query.node_id, query.tenant, query.state, query.page_size, token),
            driver.now_s,
        )
        pages.append([lease.key.conversation_id for lease in page.leases])
        token = page.next_page_token
        if not token:
            return pages


def test_pages_cover_everything_once() -> None:
    """Following the tokens gives every lease once, and the last page has no token."""
    assert all_pages(filled(5), LeaseQuery(page_size=2)) == [["c4", "c3"], ["c2", "c1"], ["c0"]]
    assert all_pages(filled(4), LeaseQuery(page_size=2)) == [["c3", "c2"], ["c1", "c0"]]
    assert all_pages(filled(6), LeaseQuery(tenant="tenant-1", page_size=2)) == [
        ["c5", "c3"],
        ["c1"],
    ]


def test_pages_are_stable_while_leases_come_and_go() -> None:
    """A lease that is there all the time comes exactly once, whatever happens between pages."""
    driver = filled(6)
    first = driver.table.list_leases(LeaseQuery(page_size=3), driver.now_s)
    assert [lease.key.conversation_id for lease in first.leases] == ["c5", "c4", "c3"]
    for key in (ConversationKey("tenant-1", "c3"), ConversationKey("tenant-0", "c2")):
        driver.settle(driver.open(key), ReadOutcome.READ, key=key)
    driver.grant(driver.open(KEY).generation, "new")
    driver.advance(61.0)
    second = driver.table.list_leases(
        LeaseQuery(page_size=3, page_token=first.next_page_token), driver.now_s
    )
    assert [lease.key.conversation_id for lease in second.leases] == ["c1", "c0"]


def test_page_sizes() -> None:
    """No size means 100, and more than 1000 means 1000."""
    driver = filled(1001)
    assert len(names(driver, LeaseQuery())) == 100
    assert len(names(driver, LeaseQuery(page_size=5000))) == 1000
    with pytest.raises(InvalidArgument, match="page_size"):
        driver.table.list_leases(LeaseQuery(page_size=-1), 0.0)


def test_foreign_page_tokens_are_refused() -> None:
    """A token that is garbage, of other filters or of another registry is an error."""
    driver = filled(5)
    token = driver.table.list_leases(LeaseQuery(page_size=2), 0.0).next_page_token
    bad = [
        LeaseQuery(page_token="garbage"),
        LeaseQuery(page_token="ä"),
        LeaseQuery(page_token=token + "A"),
        LeaseQuery(tenant="tenant-0", page_token=token),
        LeaseQuery(state=LeaseState.HELD, page_token=token),
    ]
    for query in bad:
        with pytest.raises(InvalidArgument, match="page_token"):
            driver.table.list_leases(query, 0.0)


def test_time_left_counts_down_and_ends_at_zero() -> None:
    """A view shows the time that is left now, and none for an ended lease."""
    driver = Driver()
    driver.attach(inventory=[make_grant(KEY, 7, "r")])
    driver.now_s += 80.0
    assert driver.lease().time_left_s == TTL_S - 80.0
    driver.advance(TTL_S)
    assert driver.lease().time_left_s == 0.0
