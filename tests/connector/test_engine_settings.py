"""The environment variables that bring an engine into a fleet."""

from __future__ import annotations

import pytest

from kvtide.connector.engine_settings import EngineSettings

GOOD = {
    "KVTIDE_ENGINE_REGISTRY": "10.0.0.5:7401",
    "KVTIDE_ENGINE_URL": "http://10.0.0.7:8100/",
    "PATH": "/usr/bin",
}


def test_defaults_follow_from_registry_and_url() -> None:
    """Two variables are enough: health is where the registry is, the node is named by its URL."""
    assert EngineSettings.from_environment(GOOD) == EngineSettings(
        registry="10.0.0.5:7401",
        health="10.0.0.5:7401",
        url="http://10.0.0.7:8100",
        node_id="10.0.0.7:8100",
    )


def test_without_a_registry_the_engine_is_plain() -> None:
    """No registry named means no fleet to join, which is not an error."""
    assert EngineSettings.from_environment({"PATH": "/usr/bin"}) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"KVTIDE_ENGINE_URL": ""}, "KVTIDE_ENGINE_URL"),
        ({"KVTIDE_ENGINE_URL": "10.0.0.7:8100"}, "KVTIDE_ENGINE_URL"),
        ({"KVTIDE_ENGINE_REGISTRY": "registry"}, "KVTIDE_ENGINE_REGISTRY"),
        ({"KVTIDE_ENGINE_HEALTH": "health:port"}, "KVTIDE_ENGINE_HEALTH"),
        ({"KVTIDE_ENGINE_REGISTY": "10.0.0.5:7401"}, "KVTIDE_ENGINE_REGISTY"),
    ],
)
def test_impossible_value_names_the_variable(change: dict[str, str], named: str) -> None:
    """A missing, malformed or misspelt variable stops the engine with its name."""
    with pytest.raises(ValueError, match=named):
        EngineSettings.from_environment({**GOOD, **change})
