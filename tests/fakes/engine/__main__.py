"""Runs one fake engine in a process of its own, so that it can be killed and stopped for real.

``python -m tests.fakes.engine '{"node_id": …, "role": …}'`` prints one line of
JSON when it serves, and serves until it gets SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys

from tests.fakes.engine import EngineConfig, FakeEngine


async def main(settings: str) -> None:
    """Serve until SIGTERM or SIGINT."""
    engine = FakeEngine(EngineConfig(**json.loads(settings)))
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await engine.start()
    where = {
        "url": engine.url,
        "engine_id": engine.engine_id,
        "http_port": engine.config.http_port,
        "side_channel_port": engine.config.side_channel_port,
    }
    print(json.dumps(where), flush=True)
    await stopping.wait()
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
