"""Structured logs on stdout: JSON for machines, a readable form on a terminal.

Every module logs through `get_logger(__name__)` with an event name in snake_case and the facts
as keyword arguments. Libraries that use `logging` come out in the same form.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from structlog.typing import Processor

    from kvtide.runtime.settings import LogSettings

__all__ = ["configure_logging", "get_logger"]


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose lines carry `name`. Works before and after `configure_logging`."""
    return structlog.stdlib.get_logger(name)


def configure_logging(settings: LogSettings, *, service: str) -> None:
    """Send this process's logs to stdout; each line carries `service`.

    Call it once, first thing in a command. Libraries never call it.
    """
    as_json = settings.format == "json" or (settings.format == "auto" and not sys.stdout.isatty())

    def add_service(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        return {**event, "service": service}

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_service,
    ]
    render: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if as_json
        else [structlog.dev.ConsoleRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.level.upper())
