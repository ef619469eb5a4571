"""`kvtide leases` and `kvtide nodes`, against services that know something."""

import asyncio
import json

import pytest

from kvtide.cli import main
from kvtide.health import LocalNodeHealth, NodeInfo, NodeLoad, NodeRole, health_service
from kvtide.registry import LocalLeaseRegistry, registry_service
from kvtide.runtime import ManualClock, open_channel, start_grpc_server
from kvtide.v1 import kv_pb2, lease_pb2
from kvtide.v1 import lease_pb2_grpc as lease_grpc
from tests.cli.processes import Finished


@pytest.fixture
def run(capsys):
    """Runs a command in a thread: the services it talks to live in this one's loop."""

    async def in_thread(*arguments: str) -> Finished:
        status = await asyncio.to_thread(main, arguments)
        return Finished(status, *capsys.readouterr())

    return in_thread


NODE = NodeInfo(
    node_id="decode-[1]",
    epoch="e",
    role=NodeRole.DECODE,
    engine_url="http://127.0.0.1:8200",
    models=("tiny",),
    vllm_version="0.32.0",
    block_count=1234,
)


@pytest.fixture
async def address():
    clock = ManualClock()
    registry, health = LocalLeaseRegistry(clock=clock), LocalNodeHealth(clock=clock)
    server = await start_grpc_server(
        "127.0.0.1:0", [registry_service(registry), health_service(health)]
    )
    health.connect_node(NODE, NodeLoad(pinned_blocks=7), http_serving=True)
    async with open_channel(server.address) as channel:
        attach = lease_grpc.LeaseRegistryServiceStub(channel).Attach()
        await attach.write(_attach_request())
        assert (await attach.read()).HasField("welcome")
        yield server.address
        attach.cancel()
    await registry.stop()
    await health.stop()
    await server.stop(grace_s=0)


def _attach_request() -> lease_pb2.AttachRequest:
    handle = kv_pb2.KvHandle(
        engine_id="e",
        request_id="r",
        side_channel_host="127.0.0.1",
        side_channel_port=5700,
        block_groups=[kv_pb2.BlockRuns(first_id_deltas=[1], run_lengths=[8])],
        token_count=1000,
        block_size_tokens=128,
        engine_clock_expiry_s=1e6,
    )
    fingerprint = kv_pb2.PrefixFingerprint(
        algorithm="blake2b-16", block_size_tokens=128, token_count=1000, digests=bytes(16 * 8)
    )
    grant = lease_pb2.LeaseGrant(
        conversation=lease_pb2.ConversationKey(tenant="default", conversation_id="c-1"),
        generation=5,
        handle=handle,
        fingerprint=fingerprint,
        time_left_ms=400_000,
        ttl_ms=480_000,
    )
    return lease_pb2.AttachRequest(
        hello=lease_pb2.EngineHello(node_id=NODE.node_id, epoch="e"),
        inventory=lease_pb2.EngineInventory(held=[grant]),
    )


async def test_leases_are_a_table(address, run):
    """A person sees who holds what, and for how long."""
    finished = await run("leases", "--address", address)
    assert finished.status == 0, finished.err
    title, row = (line.split() for line in finished.out.splitlines() if "c" in line)
    assert title[:3] == ["tenant", "conversation", "turn"]
    assert row[:7] == ["default", "c-1", "5", "decode-[1]", "held", "1,000", "8"]


async def test_leases_are_json_for_programs(address, run):
    """A program gets the same facts under their field names."""
    finished = await run("leases", "--address", address, "--json")
    (lease,) = json.loads(finished.out)
    assert (lease["tenant"], lease["conversation_id"]) == ("default", "c-1")
    assert (lease["state"], lease["token_count"], lease["block_count"]) == ("held", 1000, 8)
    assert lease["time_left_s"] == 400


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        (("--state", "held", "--node", "decode-[1]", "--tenant", "default"), 1),
        (("--state", "claimed"), 0),
        (("--node", "decode-2"), 0),
        (("--tenant", "other"), 0),
    ],
)
async def test_leases_can_be_filtered(address, flags, count, run):
    """Filters by state, engine and tenant are the registry's own."""
    finished = await run("leases", "--address", address, "--json", *flags)
    assert len(json.loads(finished.out)) == count


async def test_unknown_state_names_those_that_are(address, run):
    """A state that does not exist is an error with the list of those that do."""
    finished = await run("leases", "--address", address, "--state", "gone")
    assert finished.status == 1
    assert "gone" in finished.err
    assert "claimed" in finished.err


async def test_nodes_are_a_table(address, run):
    """A person sees which engines there are and how they do; brackets in names survive."""
    finished = await run("nodes", "--address", address)
    assert finished.status == 0, finished.err
    (row,) = [line.split() for line in finished.out.splitlines() if "decode" in line]
    assert row[:3] == ["decode-[1]", "decode", "ready"]
    assert "7" in row


async def test_nodes_are_json_for_programs(address, run):
    """A program gets the same facts under their field names."""
    finished = await run("nodes", "--address", address, "--json")
    (node,) = json.loads(finished.out)
    assert node["info"]["node_id"] == "decode-[1]"
    assert (node["state"], node["load"]["pinned_blocks"]) == ("ready", 7)


@pytest.mark.parametrize("command", ["leases", "nodes"])
async def test_absent_service_is_an_error(command, run):
    """When nobody answers, the message says where and what to do, without a traceback."""
    finished = await run(command, "--address", "127.0.0.1:1")
    assert finished.status == 1
    assert "answers at 127.0.0.1:1" in finished.err
    assert "--address" in finished.err
    assert "Traceback" not in finished.err


@pytest.mark.parametrize("command", ["leases", "nodes"])
async def test_bad_address_is_an_error(command, run):
    """An address without a port is refused before anything is tried."""
    finished = await run(command, "--address", "localhost")
    assert finished.status == 1
    assert "--address 'localhost' has no port" in finished.err


async def test_empty_registry_says_so(run):
    """Without leases there is a sentence, not an empty table."""
    registry = LocalLeaseRegistry()
    server = await start_grpc_server("127.0.0.1:0", [registry_service(registry)])
    finished = await run("leases", "--address", server.address)
    await registry.stop()
    await server.stop(grace_s=0)
    assert finished.out == "no leases on record\n"
