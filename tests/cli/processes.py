"""Starts `kvtide` commands as a shell would, and reads their JSON logs."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

START_TIMEOUT_S = 60


def environment(**variables: str) -> dict[str, str]:
    """What a command gets: our environment without settings of its own, and with `variables`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_")}
    return own | variables


@dataclass
class Finished:
    status: int
    out: str
    err: str


async def run(*arguments: str, **variables: str) -> Finished:
    """Run one command to its end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "kvtide.cli", *arguments),
        env=environment(**variables),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), START_TIMEOUT_S)
    return Finished(process.returncode or 0, out.decode(), err.decode())


@dataclass
class Service:
    """A serving command that is up."""

    process: asyncio.subprocess.Process
    grpc: str
    http: str | None

    async def next_event(self, name: str) -> dict[str, Any]:
        """The next log line with this event."""
        while True:
            line = await asyncio.wait_for(self.process.stdout.readline(), START_TIMEOUT_S)
            assert line, f"the service ended before it logged {name}"
            found = json.loads(line)
            if found["event"] == name:
                return found

    async def wait(self) -> int:
        """The exit status, once everything it logs has been read."""
        await asyncio.wait_for(self.process.stdout.read(), START_TIMEOUT_S)
        return await self.process.wait()


@asynccontextmanager
async def serving(*arguments: str, **variables: str) -> AsyncIterator[Service]:
    """A serving command, up and running; killed at the end if it still is."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "kvtide.cli", *arguments),
        env=environment(**variables),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    service = Service(process, "", None)
    try:
        found = await service.next_event("serving")
        service.grpc, service.http = found["grpc"], found.get("http")
        yield service
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
