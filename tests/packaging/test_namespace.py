"""One distribution, a namespace package over four roots."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOTS = ("protos", "services", "connector", "clients")


def test_namespace_has_no_init():
    """No root owns `kvtide` itself, so that each can be used without the others."""
    assert not [root for root in ROOTS if (ROOT / root / "kvtide" / "__init__.py").exists()]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory) -> set[str]:
    out = tmp_path_factory.mktemp("wheel")
    build = "import sys; from hatchling.builders.wheel import WheelBuilder as B; "
    build += "next(B(sys.argv[1]).build(directory=sys.argv[2], versions=['standard']))"
    subprocess.run([sys.executable, "-c", build, ROOT, out], check=True)
    (wheel,) = out.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_has_all_four_roots(wheel_names):
    """An ordinary install has the stubs, the services, the connector and the client."""
    for name in (
        *("kvtide/v1/lease_pb2.py", "kvtide/v1/lease.proto", "kvtide/cli/main.py"),
        *("kvtide/registry/__init__.py", "kvtide/health/__init__.py", "kvtide/router/__init__.py"),
        *("kvtide/runtime/__init__.py", "kvtide/connector/__init__.py"),
        *("kvtide/local/__init__.py", "kvtide/client/__init__.py"),
    ):
        assert name in wheel_names


def test_wheel_has_nothing_else(wheel_names):
    """Neither tests nor developer tools are installed."""
    roots = {name.partition("/")[0] for name in wheel_names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"kvtide"}


def test_connector_loads_without_the_services():
    """Inside an engine, only grpcio and protobuf are needed besides vLLM."""
    program = (
        "import sys, kvtide.connector.agent, kvtide.connector.pins, kvtide.connector.readback; "
        "heavy = {'vllm', 'aiohttp', 'pydantic', 'structlog', 'kvtide.runtime', 'torch'}; "
        "sys.exit(str(heavy & sys.modules.keys()) if heavy & sys.modules.keys() else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
