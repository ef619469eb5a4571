"""Where settings come from, which source wins, and how mistakes are named."""

import argparse
import os
from pathlib import Path

import pytest

from kvtide.runtime import Settings, SettingsError, load_settings
from kvtide.runtime.load import add_settings_flags


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in os.environ:
        if name.upper().startswith("KVTIDE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "kvtide.toml"
    path.write_text("[registry]\nclaim_limit_s = 40.0\nkeep_ended_s = 10\n")
    return path


def _load(*flags: str, config_path: Path | None = None) -> Settings:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config")
    source = add_settings_flags(parser)
    return load_settings(config_path=config_path, flags=source, parsed=parser.parse_args(flags))


def _problems(*flags: str, config_path: Path | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        _load(*flags, config_path=config_path)
    return caught.value.message.splitlines()


def test_nothing_set_gives_the_defaults():
    """Without any source the settings are those that the model documents."""
    assert _load() == load_settings() == Settings()


def test_flag_beats_environment_beats_file_beats_default(monkeypatch, config):
    """Each source overrides the weaker ones field by field, not section by section."""
    monkeypatch.setenv("KVTIDE_REGISTRY__KEEP_ENDED_S", "20")
    monkeypatch.setenv("KVTIDE_REGISTRY__SWEEP_INTERVAL_S", "2")
    found = _load("--registry.sweep_interval_s", "3", config_path=config).registry
    assert found.claim_limit_s == 40.0
    assert found.keep_ended_s == 20.0
    assert found.sweep_interval_s == 3.0
    assert found.inventory_interval_s == Settings().registry.inventory_interval_s


def test_environment_can_name_the_file(monkeypatch, config):
    """KVTIDE_CONFIG is the file when no flag names one."""
    monkeypatch.setenv("KVTIDE_CONFIG", str(config))
    assert load_settings().registry.claim_limit_s == 40.0


def test_false_is_a_value():
    """A switch can be turned off from every source."""
    assert _load("--router.readback_enabled", "false").router.readback_enabled is False


def test_unknown_variable_is_named_with_what_was_meant(monkeypatch):
    """A misspelt variable is an error, once, with the nearest name that exists."""
    monkeypatch.setenv("KVTIDE_REGISTRY__CLAIM_LIMIT", "30")
    (problem,) = _problems()
    assert problem.startswith("environment variable KVTIDE_REGISTRY__CLAIM_LIMIT: there is no such")
    assert problem.endswith("did you mean KVTIDE_REGISTRY__CLAIM_LIMIT_S?")


def test_single_underscore_is_a_mistake(monkeypatch):
    """A variable that forgets the double underscore would be ignored; it is an error."""
    monkeypatch.setenv("KVTIDE_GRPC_LISTEN", "0.0.0.0:1")
    assert "did you mean KVTIDE_GRPC__LISTEN?" in _problems()[0]


@pytest.mark.parametrize(
    "name",
    [
        "KVTIDE_ENGINE_URL",
        "KVTIDE_DEMO_ANYTHING",
        "KVTIDE_PORT",
        "KVTIDE_ROUTER_SERVICE_HOST",
        "KVTIDE_ROUTER_SERVICE_PORT_HTTP",
        "KVTIDE_ROUTER_PORT_8000_TCP_ADDR",
    ],
)
def test_variables_of_others_are_none_of_our_business(monkeypatch, name):
    """What the connector, the demo and Kubernetes put into the environment is no mistake."""
    monkeypatch.setenv(name, "tcp://10.0.0.1:8000")
    assert load_settings() == Settings()


def test_unknown_key_in_the_file_is_named(tmp_path):
    """A misspelt key or section of the file is an error with the nearest name that exists."""
    path = tmp_path / "kvtide.toml"
    path.write_text("[router]\nreadback = true\n[helth]\ndown_after_s = 5\n")
    assert _problems(config_path=path) == [
        "router.readback: there is no such setting; did you mean router.readback_enabled?",
        "helth: there is no such setting; did you mean health?",
    ]


def test_impossible_value_is_named_with_its_field_and_where_to_set_it(monkeypatch):
    """The message has the field, the value, the reason, and all three places to set it."""
    monkeypatch.setenv("KVTIDE_ROUTER__MAX_BODY_BYTES", "lots")
    (problem,) = _problems()
    assert problem.startswith("router.max_body_bytes = 'lots': Input should be a valid integer")
    for place in ("--router.max_body_bytes", "KVTIDE_ROUTER__MAX_BODY_BYTES", "[router] max_body"):
        assert place in problem


def test_rule_about_two_fields_names_both(tmp_path):
    """A value that only contradicts another one names the two of them."""
    path = tmp_path / "kvtide.toml"
    path.write_text("[health]\ndown_after_s = 2\n")
    (problem,) = _problems(config_path=path)
    assert problem.startswith("health: down_after_s = 2 is not longer than suspect_after_missed")


def test_all_mistakes_come_at_once(monkeypatch, tmp_path):
    """Nobody has to start a service three times to find three mistakes."""
    monkeypatch.setenv("KVTIDE_LOG__LEVEL", "loud")
    monkeypatch.setenv("KVTIDE_GRPC__LISTEN", "nowhere")
    monkeypatch.setenv("KVTIDE_ROUTERS__X", "1")
    assert len(_problems()) == 3


def test_broken_flag_value_is_named():
    """A flag's bad value is reported like any other."""
    (problem,) = _problems("--health.down_after_s", "soon")
    assert problem.startswith("health.down_after_s = 'soon'")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), ("[registry", "not valid TOML"), (b"\xff", "not valid TOML")],
)
def test_unreadable_file_is_named(tmp_path, content, reason):
    """A file that is missing or broken is an error with its path, never silently ignored."""
    path = tmp_path / "kvtide.toml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (problem,) = _problems(config_path=path)
    assert str(path) in problem
    assert reason in problem


def test_section_that_is_no_section_is_named(tmp_path):
    """A value where a section belongs is reported by the section's name."""
    path = tmp_path / "kvtide.toml"
    path.write_text("registry = 5\n")
    (problem,) = _problems(config_path=path)
    assert problem.startswith("registry")
