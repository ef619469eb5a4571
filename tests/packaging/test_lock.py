"""What is pinned is what is declared, whole and exact."""

import tomllib
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from requirements.lock import EXTRAS, LEFT_OUT, closure, declared, read_lock

ROOT = Path(__file__).parents[2]


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_lock_is_what_is_installed():
    """The lock has exactly what kvtide needs, in the versions that are here."""
    assert read_lock() == closure(declared()), "run `make lock`"


@pytest.mark.parametrize("requirement", declared(), ids=str)
def test_pin_is_in_its_declared_range(requirement):
    """Each range in pyproject.toml contains the version that the tests ran with."""
    name = canonicalize_name(requirement.name)
    assert requirement.specifier.contains(read_lock()[name], prereleases=True)


def test_base_install_is_only_the_client():
    """`pip install kvtide` brings grpcio and protobuf, nothing heavy."""
    names = {line.partition(">")[0] for line in _project()["dependencies"]}
    assert names == {"grpcio", "protobuf"}


def test_extras_are_those_that_are_documented():
    """The extras are the design's, plus the demo; all but the GPU engine are installed here."""
    extras = set(_project()["optional-dependencies"])
    assert extras == {"services", "engine", "engine-cpu", "demo", "dev"}
    assert set(EXTRAS) == extras - {"engine"}


def test_torch_is_pinned_apart():
    """Torch has its own file, so that pip can choose the build that fits the machine."""
    assert (ROOT / "requirements" / "torch.txt").read_text().startswith("torch==")
    assert "torch" in LEFT_OUT
    assert "torch" not in read_lock()


def test_stubs_load_on_every_protobuf_that_is_allowed():
    """The compiler is old enough for the lowest protobuf that pyproject.toml allows."""
    pins = dict(
        line.split("==")
        for line in (ROOT / "requirements" / "protos.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    (protobuf,) = [one for one in declared() if one.name == "protobuf"]
    assert protobuf.specifier.contains(pins["protobuf"])
    assert pins["protobuf"].startswith("5.29.")
