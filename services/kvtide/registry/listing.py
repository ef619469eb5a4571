"""Pages of leases, newest first.

A page token says from which serial number on downwards the next page goes, and
serial numbers never change; so leases that come or go between two pages move no other lease
from one page to another. It also carries the filters and the table it was made
for, because a position means nothing in another listing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from bisect import bisect_left
from typing import TYPE_CHECKING

from kvtide.registry.ports import LeasePage, LeaseQuery, LeaseView
from kvtide.runtime.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtide.registry.lease import Lease

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000


def page_of_leases(
    by_serial: Mapping[int, Lease], query: LeaseQuery, table_id: str, now_s: float
) -> LeasePage:
    """The page that a query asks for. ``by_serial`` is in ascending order.

    Raises ``InvalidArgument`` for a negative page size or a foreign page token.
    """
    if query.page_size < 0:
        raise InvalidArgument(
            "invalid_page_size", f"page_size must not be negative, got {query.page_size}"
        )
    size = min(query.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    serials = list(by_serial)
    listing = _listing_digest(query, table_id)
    end = len(serials)
    if query.page_token:
        end = bisect_left(serials, _serial_from_token(query.page_token, listing))
    views: list[LeaseView] = []
    for index in range(end - 1, -1, -1):
        lease = by_serial[serials[index]]
        if not _matches(lease, query):
            continue
        if len(views) == size:
            # One more matches, so there is a next page, and it starts right here.
            return LeasePage(tuple(views), _token(serials[index] + 1, listing))
        views.append(lease.view(now_s))
    return LeasePage(tuple(views))


def _matches(lease: Lease, query: LeaseQuery) -> bool:
    return (
        (not query.node_id or lease.node_id == query.node_id)
        and (not query.tenant or lease.key.tenant == query.tenant)
        and (query.state is None or lease.state is query.state)
    )


def _listing_digest(query: LeaseQuery, table_id: str) -> str:
    filters = repr((table_id, query.node_id, query.tenant, str(query.state or "")))
    return hashlib.blake2b(filters.encode(), digest_size=6).hexdigest()


def _token(serial: int, listing: str) -> str:
    return base64.urlsafe_b64encode(f"{listing}{serial}".encode()).decode().rstrip("=")


def _serial_from_token(token: str, listing: str) -> int:
    try:
        text = base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        text = ""
    serial = text.removeprefix(listing)
    if serial == text or not (serial.isascii() and serial.isdigit()):
        raise InvalidArgument(
            "invalid_page_token",
            "page_token was not handed out for this listing; start again without one",
        )
    return int(serial)
