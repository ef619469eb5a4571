"""The Makefile tells a newcomer everything it can do."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _make(*arguments: str) -> list[str]:
    command = ["make", "--no-print-directory", *arguments]
    finished = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return finished.stdout.splitlines()


def test_plain_make_is_help():
    """Typing `make` alone changes nothing and lists the targets."""
    assert _make() == _make("help")


def test_help_lists_every_target():
    """No target that is meant for people is missing from the list."""
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = [line for line in makefile.splitlines() if line.startswith(".PHONY:")]
    listed = [line.split()[1] for line in _make("help")]
    assert sorted(listed) == sorted(phony.split()[1:])
    assert {"install", "demo", "test", "check", "protos", "clean"} <= set(listed)
