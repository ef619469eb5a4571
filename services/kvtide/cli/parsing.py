"""Argument parsing as all commands have it: whole names only, and hints at what was meant."""

from __future__ import annotations

import argparse
import difflib
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["CommandParser", "add_command"]


class CommandParser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and shows its epilog as it was written."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**kwargs, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and one line, instead of a page of usage above it."""
        self.exit(2, f"{self.prog}: {message}\n")

    def reject_unknown(self, arguments: Sequence[str]) -> NoReturn:
        """Exit with status 2, naming the first unknown argument and the nearest known one."""
        name = arguments[0].partition("=")[0]
        close = difflib.get_close_matches(name, self._option_string_actions, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else f"see {self.prog} --help"
        self.error(f"unknown argument {name}; {hint}")


def add_command(
    commands: argparse._SubParsersAction[CommandParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    examples: str = "",
) -> CommandParser:
    """Add the command `name`, carried out by `run`, which returns the exit status."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"examples:\n{examples}" if examples else None,
    )
    parser.set_defaults(run=run, parser=parser)
    return parser
