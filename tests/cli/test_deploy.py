"""The example configuration in deploy/ is what the services really take."""

import os
import tomllib
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtide.connector.engine_settings import EngineSettings
from kvtide.runtime import Settings, load_settings, open_channel
from tests.cli.processes import serving

DEPLOY = Path(__file__).parents[2] / "deploy"
SERVICE_FILES = {"up": "kvtide", "router": "router", "registry": "registry", "health": "health"}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in os.environ:
        if name.upper().startswith("KVTIDE_"):
            monkeypatch.delenv(name)


def test_every_file_is_tested():
    """No example lies in deploy/ that nothing here looks at."""
    found = {path.name for path in DEPLOY.iterdir() if path.suffix in (".toml", ".env")}
    services = {f"{name}.toml" for name in SERVICE_FILES.values()}
    assert found == services | {"engine-prefill.env", "engine-decode.env"}


@pytest.mark.parametrize("name", SERVICE_FILES.values())
def test_file_loads(name):
    """Every key and value of an example passes the real settings model."""
    load_settings(config_path=DEPLOY / f"{name}.toml")


def test_example_of_everything_is_everything():
    """kvtide.toml shows each setting but the addresses, with its default."""
    path = DEPLOY / "kvtide.toml"
    shown = {
        f"{section}.{field}"
        for section, fields in tomllib.loads(path.read_text()).items()
        for field in fields
    }
    every = {
        f"{section}.{field}"
        for section, info in Settings.model_fields.items()
        for field in info.annotation.model_fields
    }
    assert every - shown == {"registry.address", "health.address"}
    assert load_settings(config_path=path) == Settings()


@pytest.mark.parametrize("command", SERVICE_FILES)
async def test_service_starts_from_its_file(command):
    """Each service comes up with its example, on ports of this test's own."""
    arguments = [command, "--config", str(DEPLOY / f"{SERVICE_FILES[command]}.toml")]
    arguments += ["--grpc.listen", "127.0.0.1:0", "--http.listen", "127.0.0.1:0"]
    async with serving(*arguments) as service, open_channel(service.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engine_environment_is_what_the_connector_reads(role):
    """An engine's example gives the connector complete settings, and nothing it does not know."""
    variables = {}
    for line in (DEPLOY / f"engine-{role}.env").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            variables[name] = value
    found = EngineSettings.from_environment(variables)
    assert found is not None
    assert found.node_id == f"{role}-0"
    assert found.registry != found.health
    assert {"VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"} <= variables.keys()
