from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.router.harness import Harness

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    """A started router with one scripted prefill and one scripted decode engine."""
    harness = Harness(claim_timeout_s=0.5)
    await harness.start()
    yield harness
    await harness.stop()
