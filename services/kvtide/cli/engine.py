"""`kvtide engine`: one vLLM engine with the right flags and environment."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

from kvtide.cli.parsing import add_command
from kvtide.runtime.engine_command import (
    EngineDevice,
    EngineOptions,
    EngineRole,
    engine_command,
    engine_environment,
    installed_device,
)

if TYPE_CHECKING:
    import argparse

    from kvtide.cli.parsing import CommandParser

__all__ = ["add_command_to", "run"]

_HTTP_PORTS = {EngineRole.PREFILL: 8100, EngineRole.DECODE: 8200}
_SIDE_CHANNEL_PORTS = {EngineRole.PREFILL: 5600, EngineRole.DECODE: 5700}
_LOCAL_SERVICES = "127.0.0.1:7400"

_EXAMPLES = """\
  kvtide engine prefill --model build/models/SmolLM2-135M-Instruct --cpu-core 0
  kvtide engine decode --model build/models/SmolLM2-135M-Instruct --cpu-core 1
  kvtide engine decode --model Qwen/Qwen3-32B -- --tensor-parallel-size 2
  kvtide engine prefill --model DIR --print      show the command, don't run it"""


def add_command_to(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add `kvtide engine`."""
    parser = add_command(
        commands,
        "engine",
        run,
        summary="start a vLLM engine that joins the fleet",
        examples=_EXAMPLES,
    )
    add = parser.add_argument
    add("role", choices=["prefill", "decode"], help="which leg of a turn it serves")
    add("--model", required=True, metavar="DIR", help="directory or hub name of the model")
    add("--served-model-name", default="", metavar="NAME", help="its name (default: --model)")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, help="HTTP port (default: 8100 for prefill, 8200 for decode)")
    add("--url", default="", help="base URL that routers reach it by (default: from host and port)")
    add(
        "--side-channel-port",
        type=int,
        metavar="PORT",
        help="NIXL port (default: 5600 for prefill, 5700 for decode)",
    )
    add(
        "--side-channel-host",
        default="",
        metavar="HOST",
        help="host that other engines reach it by (default: --host)",
    )
    add(
        "--registry",
        default=_LOCAL_SERVICES,
        metavar="HOST:PORT",
        help=f"lease registry; empty for none (default: {_LOCAL_SERVICES})",
    )
    add(
        "--health",
        default="",
        metavar="HOST:PORT",
        help="node health (default: where the registry is)",
    )
    add("--node-id", default="", metavar="NAME", help="stable name (default: from role and port)")
    add("--dtype", default="bfloat16", help="of weights and KV (default: bfloat16)")
    add("--device", choices=["cpu", "cuda"], help="(default: what the installed vLLM is for)")
    add("--cpu-core", type=int, metavar="N", help="compute on this core only (default: on all)")
    add(
        "--kv-cache-gib",
        type=float,
        metavar="GIB",
        help="size of the KV pool (default: 1 on a CPU, what fits on a GPU)",
    )
    add(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="longest prompt plus answer (default: the model's)",
    )
    add(
        "--decoder-kv-blocks-ttl-s",
        type=float,
        default=480.0,
        metavar="SECONDS",
        help="how long a finished turn's blocks stay readable (default: 480)",
    )
    add(
        "--kv-recompute-threshold-tokens",
        type=int,
        default=64,
        metavar="TOKENS",
        help="fewer missing tokens than this are recomputed, not read back (default: 64)",
    )
    add(
        "--nixl-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="such as UCX or LIBFABRIC, repeatable (default: the connector's)",
    )
    add(
        "--no-prefix-caching",
        action="store_true",
        help="without the engine's own prefix cache, as if it were always evicted",
    )
    add("--print", action="store_true", help="print the command and its environment, and end")
    parser.usage = "kvtide engine {prefill,decode} --model DIR [option …] [-- vLLM arguments]"


def run(parsed: argparse.Namespace) -> int:
    """Become the engine; with --print, only say how."""
    options = _options(parsed)
    command, variables = engine_command(options), engine_environment(options)
    if not parsed.print:
        # In place of this process, so that signals and the exit status are the engine's own.
        os.execve(command[0], command, {**os.environ, **variables})  # noqa: S606
    lines = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    print(" \\\n".join(["env", *lines, shlex.join(command)]))
    return 0


def _options(parsed: argparse.Namespace) -> EngineOptions:
    role = EngineRole(parsed.role)
    return EngineOptions(
        role=role,
        model=parsed.model,
        served_model_name=parsed.served_model_name,
        device=EngineDevice(parsed.device) if parsed.device else installed_device(),
        host=parsed.host,
        port=_HTTP_PORTS[role] if parsed.port is None else parsed.port,
        advertised_url=parsed.url,
        side_channel_host=parsed.side_channel_host,
        side_channel_port=(
            _SIDE_CHANNEL_PORTS[role]
            if parsed.side_channel_port is None
            else parsed.side_channel_port
        ),
        registry_address=parsed.registry,
        health_address=parsed.health,
        node_id=parsed.node_id,
        dtype=parsed.dtype,
        cpu_core=parsed.cpu_core,
        kv_cache_gib=parsed.kv_cache_gib,
        max_model_len_tokens=parsed.max_model_len,
        decoder_kv_blocks_ttl_s=parsed.decoder_kv_blocks_ttl_s,
        kv_recompute_threshold_tokens=parsed.kv_recompute_threshold_tokens,
        nixl_backends=tuple(parsed.nixl_backend),
        prefix_caching=not parsed.no_prefix_caching,
        extra_arguments=tuple(parsed.passed_on),
    )
