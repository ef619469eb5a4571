"""Logs."""

import json
import logging

import pytest
import structlog

from kvtide.runtime import LogSettings, configure_logging, get_logger


@pytest.fixture(autouse=True)
def _restore_logging():
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def _lines(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_json_lines_carry_the_facts(capsys):
    """Each line is one JSON object with event, level, logger, service, time and the facts."""
    configure_logging(LogSettings(), service="router")
    get_logger("kvtide.x").info("turn_served", tokens=5)
    (line,) = _lines(capsys)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "turn_served",
        "tokens": 5,
        "level": "info",
        "logger": "kvtide.x",
        "service": "router",
    }


def test_libraries_log_in_the_same_form(capsys):
    """What a library says through `logging` is a line like ours."""
    configure_logging(LogSettings(), service="router")
    logging.getLogger("aiohttp").warning("lost %s", "peer")
    (line,) = _lines(capsys)
    assert (line["event"], line["level"], line["service"]) == ("lost peer", "warning", "router")


def test_traceback_stays_on_its_line(capsys):
    """An exception does not break the one-object-a-line form."""
    configure_logging(LogSettings(), service="router")
    try:
        raise ValueError("boom")  # noqa: TRY301
    except ValueError:
        get_logger("kvtide.x").exception("failed")
    (line,) = _lines(capsys)
    assert "ValueError: boom" in line["exception"]


def test_level_hides_what_is_below_it(capsys):
    """Lines below the level are not written, ours and libraries' alike."""
    configure_logging(LogSettings(level="warning"), service="router")
    get_logger("kvtide.x").info("quiet")
    logging.getLogger("aiohttp").info("quiet")
    get_logger("kvtide.x").error("loud")
    assert [line["event"] for line in _lines(capsys)] == ["loud"]


def test_bound_context_is_on_every_line(capsys):
    """What is bound for the length of a turn is on all of its lines."""
    configure_logging(LogSettings(), service="router")
    with structlog.contextvars.bound_contextvars(turn_id="t-1"):
        get_logger("kvtide.x").info("inside")
    get_logger("kvtide.x").info("outside")
    inside, outside = _lines(capsys)
    assert inside["turn_id"] == "t-1"
    assert "turn_id" not in outside


def test_console_form_is_for_people(capsys):
    """The console form is no JSON, and shows event and facts."""
    configure_logging(LogSettings(format="console"), service="router")
    get_logger("kvtide.x").info("turn_served", tokens=5)
    text = capsys.readouterr().out
    assert "turn_served" in text
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


def test_logging_works_before_it_is_configured():
    """A library user who configures nothing gets no exception."""
    get_logger("kvtide.x").info("early", tokens=5)
