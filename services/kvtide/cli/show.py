"""`kvtide leases` and `kvtide nodes`: what the services know now."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvtide.cli.parsing import add_command
from kvtide.runtime import InvalidArgument, Unavailable, open_channel
from kvtide.runtime.address import split_address

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from kvtide.cli.parsing import CommandParser
    from kvtide.health import Node
    from kvtide.registry import LeaseQuery, LeaseView

__all__ = ["add_commands"]

_LOCAL_SERVICES = "127.0.0.1:7400"
_PAGE_SIZE = 1000


def add_commands(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add both commands."""
    leases = add_command(
        commands,
        "leases",
        _leases,
        summary="list the leases on record, newest grant first",
        examples="  kvtide leases\n  kvtide leases --state held --node decode-8200 --json",
    )
    leases.add_argument("--node", default="", metavar="NAME", help="of this engine only")
    leases.add_argument("--tenant", default="", metavar="NAME", help="of this tenant only")
    leases.add_argument("--state", default="", help="in this state only, such as held")
    nodes = add_command(
        commands,
        "nodes",
        _nodes,
        summary="list the engines and how they are",
        examples="  kvtide nodes\n  kvtide nodes --address health:7402 --json",
    )
    for parser in (leases, nodes):
        parser.add_argument(
            "--address",
            default=_LOCAL_SERVICES,
            metavar="HOST:PORT",
            help=f"gRPC address of the service (default: {_LOCAL_SERVICES})",
        )
        parser.add_argument("--json", action="store_true", help="JSON instead of a table")


def _leases(parsed: argparse.Namespace) -> int:
    from kvtide.registry import LeaseQuery, LeaseState

    states = [str(state) for state in LeaseState]
    if parsed.state and parsed.state not in states:
        message = f"--state {parsed.state}: there is no such state; one of {', '.join(states)}"
        raise InvalidArgument("bad_state", message)
    query = LeaseQuery(
        node_id=parsed.node,
        tenant=parsed.tenant,
        state=LeaseState(parsed.state) if parsed.state else None,
        page_size=_PAGE_SIZE,
    )
    leases = asyncio.run(_all_leases(_checked(parsed.address), query))
    if parsed.json:
        _print_json(map(_lease_json, leases))
        return 0
    _print_table(
        "no leases on record",
        ("tenant", "conversation", "turn", "engine", "state", "why", "tokens", "blocks", "left"),
        [
            (
                lease.key.tenant,
                lease.key.conversation_id,
                str(lease.generation),
                lease.node_id,
                str(lease.state),
                str(lease.end_reason or ""),
                f"{lease.token_count:,}",
                f"{lease.block_count:,}",
                f"{lease.time_left_s:.0f} s" if lease.time_left_s else "",
            )
            for lease in leases
        ],
    )
    return 0


async def _all_leases(address: str, query: LeaseQuery) -> list[LeaseView]:
    from dataclasses import replace

    from kvtide.registry import GrpcLeaseRegistry

    async with open_channel(address) as channel:
        registry = GrpcLeaseRegistry(channel)
        found: list[LeaseView] = []
        while True:
            try:
                page = await registry.list_leases(query)
            except Unavailable as error:
                raise _unreachable("registry", address, error) from error
            found += page.leases
            if not page.next_page_token:
                return found
            query = replace(query, page_token=page.next_page_token)


def _nodes(parsed: argparse.Namespace) -> int:
    nodes = asyncio.run(_all_nodes(_checked(parsed.address)))
    if parsed.json:
        _print_json(asdict(node) for node in nodes)
        return 0
    _print_table(
        "no engines have reported",
        (
            "engine",
            "role",
            "state",
            "url",
            "models",
            "vLLM",
            "running",
            "waiting",
            "pinned",
            "free",
        ),
        [
            (
                node.info.node_id,
                str(node.info.role),
                str(node.state),
                node.info.engine_url,
                ", ".join(node.info.models),
                node.info.vllm_version,
                str(node.load.running_requests),
                str(node.load.waiting_requests),
                f"{node.load.pinned_blocks:,}",
                f"{node.load.free_blocks:,} of {node.info.block_count:,}",
            )
            for node in nodes
        ],
    )
    return 0


async def _all_nodes(address: str) -> list[Node]:
    from kvtide.health import GrpcNodeHealth

    async with open_channel(address) as channel:
        try:
            return await GrpcNodeHealth(channel).list_nodes()
        except Unavailable as error:
            raise _unreachable("node health", address, error) from error


def _checked(address: str) -> str:
    try:
        split_address(address)
    except ValueError as error:
        raise InvalidArgument("bad_address", f"--address {address!r} {error}") from error
    return address


def _unreachable(what: str, address: str, error: Unavailable) -> Unavailable:
    message = f"no {what} answers at {address}; is it running? --address names another ({error})"
    return Unavailable(error.code, message)


def _lease_json(lease: LeaseView) -> dict[str, Any]:
    fields = asdict(lease)
    return {**fields.pop("key"), **fields}


def _print_json(items: Iterable[dict[str, Any]]) -> None:
    print(json.dumps(list(items), indent=2))


def _print_table(if_empty: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        print(if_empty)
        return
    table = Table(box=box.SIMPLE, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        # Text: ids may have square brackets, which are markup to rich.
        table.add_row(*map(Text, row))
    console = Console()
    if not console.is_terminal:
        # A pipe has no width; nothing may be cut off for one.
        console.width = 10_000
    console.print(table)
