"""A read is good only if it ended before its owner's deadline, by the owner's clock."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from kvtide.connector.worker import LeasedNixlWorker

if TYPE_CHECKING:
    from collections.abc import Callable

OFFSET_S = 7_200.0


@pytest.fixture
def finish_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[float | None], bool]:
    """Lets one read end whose deadline is that many seconds from now; True if it counts as good."""

    def run(left_s: float | None) -> bool:
        monkeypatch.setattr(
            NixlPullConnectorWorker, "_pop_done_transfers", lambda *_: ({"request"}, set())
        )
        worker = LeasedNixlWorker.__new__(LeasedNixlWorker)
        expiry_s = None if left_s is None else time.perf_counter() + OFFSET_S + left_s
        remote = SimpleNamespace(engine_id="owner", blocks_expiry_time=expiry_s)
        worker._recving_metadata = {"request": SimpleNamespace(remote=remote)}
        worker._engine_clock_offset = {"owner": OFFSET_S}
        worker.xfer_stats = SimpleNamespace(record_kv_expired_req=lambda: None)
        done, failed = worker._pop_done_transfers({})
        assert done == {"request"}
        return not failed

    return run


def test_read_that_ended_in_time_counts(finish_read: Callable[[float | None], bool]) -> None:
    """A read that ended before the deadline is used, though the owner's clock is hours ahead."""
    assert finish_read(60.0)


def test_read_that_ended_late_has_failed(finish_read: Callable[[float | None], bool]) -> None:
    """A read that ended after the deadline may hold another request's KV: it is recomputed."""
    assert not finish_read(-0.001)


def test_owner_without_deadline_is_upstreams_case(
    finish_read: Callable[[float | None], bool],
) -> None:
    """A handle without a deadline (a stock prefill engine's) is read as upstream reads it."""
    assert finish_read(None)
