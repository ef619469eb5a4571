"""The `kvtide` command."""

from kvtide.cli.main import main

__all__ = ["main"]
