"""The checked-in stubs are what the protos say."""

import subprocess
from pathlib import Path

import pytest

from tests.protos.descriptors import MODULES

ROOT = Path(__file__).parents[2]
PROTO_ROOT = ROOT / "protos"


@pytest.fixture(scope="module")
def fresh_stubs(tmp_path_factory) -> Path:
    subprocess.run(["make", "-s", "build/proto-venv/.installed"], cwd=ROOT, check=True)
    out = tmp_path_factory.mktemp("stubs")
    compiler = ROOT / "build/proto-venv/bin/python"
    subprocess.run([compiler, "-m", "protos.tools.generate", "--out", out], cwd=ROOT, check=True)
    return out


def test_stubs_are_up_to_date(fresh_stubs):
    """Regenerating gives exactly the checked-in stubs, none missing and none left over."""
    fresh = {path.relative_to(fresh_stubs): path for path in fresh_stubs.rglob("*.py*")}
    checked_in = {
        path.relative_to(PROTO_ROOT): path
        for pattern in ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")
        for path in (PROTO_ROOT / "kvtide").rglob(pattern)
    }
    assert checked_in.keys() == fresh.keys(), "run `make protos`"
    differing = [
        str(name)
        for name, path in fresh.items()
        if path.read_text() != checked_in[name].read_text()
    ]
    assert not differing, "run `make protos`"


def test_every_proto_is_checked():
    """The compatibility and naming tests look at every proto file there is."""
    sources = {str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.rglob("*.proto")}
    assert sources == {module.DESCRIPTOR.name for module in MODULES}
