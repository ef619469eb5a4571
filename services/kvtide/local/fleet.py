"""A whole fleet on one machine: `kvtide up`, and real vLLM engines that join it.

`make demo` and the real-engine tests stand on this. Everything listens on loopback, on ports that
were free, and nothing is left when the fleet stops: no process, no port, no temporary file.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import grpc

from kvtide.local.engine_log import start_stage
from kvtide.local.metrics import read_metrics
from kvtide.local.ports import LOOPBACK, pick_free, wait_free
from kvtide.local.processes import (
    ManagedProcess,
    ProcessError,
    module_command,
    python_environment,
    stop_all,
    wait_all,
)
from kvtide.runtime.engine_command import (
    ConnectorKind,
    EngineOptions,
    EngineRole,
    engine_command,
    engine_environment,
    installed_device,
)
from kvtide.v1 import node_pb2, node_pb2_grpc

if TYPE_CHECKING:
    from types import TracebackType

SERVICES = "kvtide"
"""Name of the process that holds router, registry and node health."""

DEFAULT_START_TIMEOUT_S = 600.0
_PROBE_TIMEOUT_S = 2.0
_PORTS_CLOSE_TIMEOUT_S = 10.0

StartProgress = Callable[[float, Mapping[str, str]], None]
"""Called while the fleet starts: seconds so far, and what each unready process is busy with."""


@dataclass(frozen=True)
class LocalEngine:
    """One engine of the fleet; its name is its node id."""

    name: str
    options: EngineOptions
    process: ManagedProcess

    @property
    def url(self) -> str:
        """Base URL of its HTTP endpoint."""
        return self.options.url

    @property
    def joins_fleet(self) -> bool:
        """Whether it reports to node health."""
        return bool(self.options.registry_address) and (
            self.options.connector is ConnectorKind.LEASED
            and self.options.role is not EngineRole.WHOLE
        )


class LocalFleet:
    """A context manager: inside, everything is ready; after it, everything is gone.

    Engines are called "prefill-0", "decode-0", "whole-0" and so on; `whole` ones are ordinary vLLM
    without transfers, to compare with. `engine` holds fields of `EngineOptions` for all of them,
    `role_engine` those of one role, which win. `settings` are settings of the services, such as
    {"registry.claim_limit_s": "30"}. Without `services` the engines stand alone.

    Raises ProcessError when something does not start; what did start is stopped then.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        prefill: int = 1,
        decode: int = 1,
        whole: int = 0,
        services: bool = True,
        engine: Mapping[str, Any] | None = None,
        role_engine: Mapping[EngineRole, Mapping[str, Any]] | None = None,
        settings: Mapping[str, str] | None = None,
        log_dir: Path = Path("build/logs"),
        start_timeout_s: float = DEFAULT_START_TIMEOUT_S,
        progress: StartProgress = lambda _waited_s, _stages: None,
    ) -> None:
        self.model_dir = model_dir
        self.start_timeout_s = start_timeout_s
        self._counts = {
            EngineRole.PREFILL: prefill,
            EngineRole.DECODE: decode,
            EngineRole.WHOLE: whole,
        }
        self._with_services = services
        self._engine_fields = {"served_model_name": model_dir.name, **(engine or {})}
        self._role_fields = role_engine or {}
        self._settings = dict(settings or {})
        self._log_dir = log_dir
        self._progress = progress
        self._http_port = 0
        self._grpc_port = 0
        self._ports: list[int] = []
        self._services: ManagedProcess | None = None
        self._engines: dict[str, LocalEngine] = {}
        self._temporary_dir: Path | None = None

    # What is there, and where.

    @property
    def model_name(self) -> str:
        """The model's name in requests."""
        return str(self._engine_fields["served_model_name"])

    @property
    def http_url(self) -> str:
        """Base URL of kvtide's HTTP endpoint, without a path."""
        return f"http://{LOOPBACK}:{self._http_port}"

    @property
    def grpc_address(self) -> str:
        """host:port of kvtide's gRPC services."""
        return f"{LOOPBACK}:{self._grpc_port}"

    @property
    def engines(self) -> list[LocalEngine]:
        """Every engine, in the order in which they were started."""
        return list(self._engines.values())

    @property
    def ports(self) -> list[int]:
        """Every port that the fleet listens on."""
        return list(self._ports)

    def engine(self, name: str) -> LocalEngine:
        """The engine of that name."""
        return self._engines[name]

    def process(self, name: str) -> ManagedProcess:
        """The process of an engine, or of the services (`SERVICES`)."""
        if name == SERVICES and self._services is not None:
            return self._services
        return self._engines[name].process

    def metrics(self, name: str) -> dict[str, float]:
        """What an engine, or the services (`SERVICES`), count; see `parse_metrics`."""
        return read_metrics(self.http_url if name == SERVICES else self._engines[name].url)

    def nodes(self) -> dict[str, node_pb2.Node]:
        """What node health says, by node id. Raises grpc.RpcError when it does not answer."""
        with grpc.insecure_channel(self.grpc_address) as channel:
            stub = node_pb2_grpc.NodeHealthServiceStub(channel)
            answer = stub.ListNodes(node_pb2.ListNodesRequest(), timeout=_PROBE_TIMEOUT_S)
        return {node.info.node_id: node for node in answer.nodes}

    # Its life.

    def start(self) -> None:
        """Starts everything side by side and waits until all of it is ready."""
        try:
            self._plan()
            for process in self._processes():
                process.start()
            self.wait_ready()
        except BaseException:
            # Ctrl-C too: an engine that is still starting is a process like any other.
            self.stop()
            raise

    def stop(self) -> None:
        """Stops everything side by side. Raises ProcessError if a port stays taken."""
        stop_all(self._processes())
        if self._temporary_dir is not None:
            shutil.rmtree(self._temporary_dir, ignore_errors=True)
            self._temporary_dir = None
        left = wait_free(self._ports, _PORTS_CLOSE_TIMEOUT_S)
        if left:
            raise ProcessError(f"the fleet has stopped, but something listens on {left}")

    def wait_ready(self) -> None:
        """Waits for every process that should run; see `start_timeout_s`."""
        awaited = [(engine.process, self._ready_check(engine)) for engine in self.engines]
        if self._services is not None:
            awaited.insert(0, (self._services, self._services_ready))
        wait_all(awaited, "it was ready", self.start_timeout_s, self._tell)

    def check_running(self) -> None:
        """Raises ProcessError, with the end of its log, if something of the fleet has ended."""
        for process in self._processes():
            if not process.is_running():
                raise ProcessError(
                    f"{process.name} has ended with exit code {process.exit_code()}; the end of "
                    f"{process.log_path}:\n{process.log_tail()}"
                )

    # Faults on purpose. Each takes the name of an engine, or `SERVICES`.

    def kill(self, name: str) -> None:
        """Kill -9 of the whole process tree, and nothing else."""
        self.process(name).kill()

    def restart(self, name: str, *, wait: bool = True) -> None:
        """Kill -9, then a new start on the same ports; `wait`: until it is ready again."""
        process = self.process(name)
        # What the fleet knew of the old one must not pass for the new one.
        check: Callable[[], bool] = self._services_ready
        ports = [self._http_port, self._grpc_port]
        if name != SERVICES:
            engine = self._engines[name]
            check = self._ready_check(engine, not_epoch=self._epoch(engine))
            ports = [
                port for port in (engine.options.port, engine.options.side_channel_port) if port
            ]
        process.kill()
        left = wait_free(ports, _PORTS_CLOSE_TIMEOUT_S)
        if left:
            raise ProcessError(f"{name} was killed, but something listens on {left}")
        process.start()
        if wait:
            wait_all([(process, check)], "it was ready again", self.start_timeout_s, self._tell)

    def suspend(self, name: str) -> None:
        """SIGSTOP: it keeps its ports and memory, and answers nothing."""
        self.process(name).suspend()

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self.process(name).resume()

    # How it comes to be.

    def _plan(self) -> None:
        """Chooses ports and cores, and makes the processes, unstarted."""
        transferring = self._counts[EngineRole.PREFILL] + self._counts[EngineRole.DECODE]
        ports = pick_free(2 + sum(self._counts.values()) + transferring)
        self._ports = list(ports)
        self._http_port, self._grpc_port = ports.pop(), ports.pop()
        self._temporary_dir = Path(tempfile.mkdtemp(prefix="kvtide-"))
        self._log_dir.mkdir(parents=True, exist_ok=True)
        if self._with_services:
            self._services = ManagedProcess(
                SERVICES,
                [*module_command("kvtide.cli", "up"), *self._service_flags()],
                log_path=self._log_dir / f"{SERVICES}.log",
                env=self._environment({}),
            )
        cores = sorted(os.sched_getaffinity(0))
        for role, count in self._counts.items():
            for number in range(count):
                name = f"{role.value}-{number}"
                options = self._options(role, name, cores[len(self._engines) % len(cores)], ports)
                process = ManagedProcess(
                    name,
                    engine_command(options),
                    log_path=self._log_dir / f"{name}.log",
                    env=self._environment(engine_environment(options)),
                )
                self._engines[name] = LocalEngine(name, options, process)

    def _options(self, role: EngineRole, name: str, core: int, ports: list[int]) -> EngineOptions:
        options = EngineOptions(
            role=role,
            model=str(self.model_dir),
            port=ports.pop(),
            side_channel_port=0 if role is EngineRole.WHOLE else ports.pop(),
            device=installed_device(),
            node_id=name,
            registry_address=self.grpc_address if self._with_services else "",
            cpu_core=core,
            dtype="float32",
        )
        fields = {**self._engine_fields, **self._role_fields.get(role, {})}
        return replace(options, **fields)

    def _service_flags(self) -> list[str]:
        settings = {
            "http.listen": f"{LOOPBACK}:{self._http_port}",
            "grpc.listen": self.grpc_address,
            **self._settings,
        }
        return [word for name, value in settings.items() for word in (f"--{name}", value)]

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {
            **python_environment(),
            # vLLM leaves sockets in the temporary directory; there they go with the fleet.
            "TMPDIR": str(self._temporary_dir),
            # The model lies on disk; nothing is to be asked of the network.
            "HF_HUB_OFFLINE": "1",
            **variables,
        }

    def _processes(self) -> list[ManagedProcess]:
        services = [] if self._services is None else [self._services]
        return [*services, *(engine.process for engine in self._engines.values())]

    # When it is ready.

    def _services_ready(self) -> bool:
        return _answers(f"{self.http_url}/health")

    def _ready_check(self, engine: LocalEngine, not_epoch: str = "") -> Callable[[], bool]:
        def is_ready() -> bool:
            if not _answers(f"{engine.url}/health"):
                return False
            if not engine.joins_fleet:
                return True
            node = self._node(engine)
            return (
                node is not None
                and node.state == node_pb2.NODE_STATE_READY
                and node.info.epoch != not_epoch
            )

        return is_ready

    def _epoch(self, engine: LocalEngine) -> str:
        node = self._node(engine) if engine.joins_fleet else None
        return "" if node is None else str(node.info.epoch)

    def _node(self, engine: LocalEngine) -> node_pb2.Node | None:
        try:
            return self.nodes().get(engine.name)
        except grpc.RpcError:
            return None

    def _tell(self, waited_s: float, pending: Sequence[ManagedProcess]) -> None:
        stages = {
            process.name: (
                "starting" if process is self._services else start_stage(process.log_lines())
            )
            for process in pending
        }
        self._progress(waited_s, stages)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_PROBE_TIMEOUT_S) as response:  # noqa: S310 - our own http URL
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False
