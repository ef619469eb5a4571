"""The `kvtide` command as a shell sees it."""

import pytest

from kvtide.cli import main

COMMANDS = ["up", "router", "registry", "health", "engine", "leases", "nodes", "version"]


def _fails(capsys, *arguments: str) -> str:
    """Run a command that exits with status 2; its stderr."""
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2
    return capsys.readouterr().err


def _help(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_command(capsys):
    """Someone who knows nothing finds all commands and a first example."""
    text = _help(capsys)
    for command in [*COMMANDS, "demo"]:
        assert f"\n    {command} " in text
    assert "kvtide up" in text.partition("examples:")[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(capsys, command):
    """Every command's help says what it does; those that take options have examples."""
    text = _help(capsys, command)
    assert text.startswith("usage: kvtide")
    if command != "version":
        assert f"kvtide {command}" in text.partition("examples:")[2]


@pytest.mark.parametrize("command", ["up", "router", "registry", "health"])
def test_help_of_a_service_lists_every_setting(capsys, command):
    """All settings are flags of each service, with unit and default."""
    text = _help(capsys, command)
    for flag in (
        "--config",
        "--registry.claim_limit_s",
        "--router.readback_enabled",
        "--log.level",
    ):
        assert flag in text
    assert "in seconds" in text
    assert "default: 60.0" in text


def test_version_names_what_matters(capsys):
    """A bug report starts with kvtide's and the engine's versions."""
    assert main(["version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("kvtide ")
    assert any(line.startswith("grpcio ") for line in lines)


def test_no_command_is_an_error(capsys):
    """Without a command there is a hint, not a traceback."""
    assert "COMMAND" in _fails(capsys)


def test_unknown_command_is_named(capsys):
    """A command that does not exist is named beside those that do."""
    text = _fails(capsys, "serve")
    assert "'serve'" in text
    assert "registry" in text


def test_unknown_flag_is_named_with_what_was_meant(capsys):
    """A misspelt flag is named with the nearest one, for services and tools alike."""
    text = _fails(capsys, "up", "--registry.claim_limit", "30")
    assert "--registry.claim_limit;" in text
    assert "did you mean --registry.claim_limit_s?" in text
    assert "--help" in _fails(capsys, "nodes", "--qqq")


def test_flags_are_never_guessed_from_their_beginning(capsys):
    """An abbreviation may mean another flag tomorrow, so it means none today."""
    assert "did you mean --side-channel-port" in _fails(
        capsys, "engine", "prefill", "--model", "m", "--side-channel-p", "1"
    )


def test_bad_setting_is_named(capsys):
    """An impossible value ends the command with the setting's name, before anything starts."""
    text = _fails(capsys, "registry", "--registry.claim_min_left_s", "1")
    assert text.startswith("kvtide: registry: claim_min_left_s = 1 is too short")


@pytest.mark.parametrize("setting", ["registry.address", "health.address"])
def test_router_alone_needs_to_know_the_others(capsys, setting):
    """`kvtide router` without an address says which one and how to give it."""
    other = {"registry.address": "health.address", "health.address": "registry.address"}[setting]
    text = _fails(capsys, "router", f"--{other}", "h:1")
    assert f"{setting} is not set" in text
    assert f"--{setting} HOST:PORT" in text


def test_up_runs_its_own_registry(capsys):
    """`kvtide up` with the address of another registry is a contradiction, and says so."""
    text = _fails(capsys, "up", "--registry.address", "r:1")
    assert "registry.address = 'r:1'" in text
    assert "kvtide router" in text


def test_only_engine_passes_arguments_on(capsys):
    """Arguments after "--" mean something to an engine only."""
    assert "`kvtide engine` only" in _fails(capsys, "nodes", "--", "--seed", "1")
