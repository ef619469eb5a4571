"""Which engines the tests run on: ``--engine=fake`` (the default) or ``--engine=cpu``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.suite.fleets import Fleet

_FAKE_ONLY = "fake_only"
_ENGINE = "engine"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--engine``."""
    parser.addoption(
        "--engine",
        choices=("fake", "cpu"),
        default="fake",
        help="engines under the suite: fake ones in this process, or real vLLM on the CPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare our marker."""
    text = f"{_FAKE_ONLY}: needs faults or clocks that only fake engines have"
    config.addinivalue_line("markers", text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the chosen engines cannot run."""
    unwanted = _FAKE_ONLY if config.getoption("--engine") == "cpu" else _ENGINE
    left_out = [item for item in items if item.get_closest_marker(unwanted)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker(unwanted)]


@pytest.fixture(scope="session")
def engine_kind(request: pytest.FixtureRequest) -> str:
    """The value of ``--engine``."""
    return str(request.config.getoption("--engine"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def fleet(engine_kind: str) -> AsyncIterator[Fleet]:
    """One fleet for all tests of the suite, behind kvtide, with a monolith beside it."""
    if engine_kind == "cpu":
        # Needs vLLM, torch and a minute; the fake one needs none of them.
        from tests.suite.cpu_fleet import CpuFleet  # noqa: PLC0415

        async with CpuFleet() as real:
            yield real
        return
    from tests.suite.fake_fleet import FakeFleet  # noqa: PLC0415

    async with FakeFleet() as fake:
        yield fake
