"""A fake engine in a process of its own: what a signal does to it is the real thing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fakes.engine.config import EngineConfig

_ROOT = Path(__file__).parents[3]
_PATHS = (_ROOT, *(_ROOT / name for name in ("protos", "services", "connector", "clients")))


class EngineProcess:
    """Starts, kills and stops one engine process; each start is a new engine on the same ports."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.engine_id = ""
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """Base URL of the OpenAI endpoint, without a path."""
        return f"http://{self.config.host}:{self.config.http_port}"

    async def start(self) -> None:
        """Start and wait until it serves."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, _PATHS))}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.fakes.engine",
            json.dumps(asdict(self.config)),
            stdout=PIPE,
            env=environment,
        )
        assert self._process.stdout is not None
        where = json.loads(await self._process.stdout.readline())
        self.engine_id = where["engine_id"]
        self.config = replace(
            self.config,
            http_port=where["http_port"],
            side_channel_port=where["side_channel_port"],
        )

    async def kill(self) -> None:
        """SIGKILL, and reap. Does nothing when it is not running."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, and reap. Does nothing when it is not running."""
        await self._end(signal.SIGTERM)

    def hang(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    async def _end(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._signal(number)
            await self._process.wait()
        self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
