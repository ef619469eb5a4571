"""Ports: the free ones are found, and taken ones are seen."""

from __future__ import annotations

import socket

import pytest

from kvtide.local import ports


@pytest.fixture
def taken_port():
    with socket.create_server((ports.LOOPBACK, 0)) as server:
        yield server.getsockname()[1]


def test_picked_ports_are_different_and_can_be_listened_on() -> None:
    """Every port that is picked is free at once, beside the others."""
    picked = ports.pick_free(8)
    assert len(set(picked)) == 8
    servers = [socket.create_server((ports.LOOPBACK, port)) for port in picked]
    for server in servers:
        server.close()


def test_picked_ports_are_out_of_the_way_of_outgoing_connections() -> None:
    """A port from outside the ephemeral range is still there to listen on after a restart."""
    assert all(20_000 <= port < 32_000 for port in ports.pick_free(8))


def test_ports_given_away_before_are_not_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports promised to others, though nothing listens on them yet, are left alone."""
    first = ports.pick_free(1)[0]
    monkeypatch.setattr(ports, "_FIRST_PORT", first)
    monkeypatch.setattr(ports, "_LAST_PORT", first + 1)
    assert ports.pick_free(1) == [first]
    with pytest.raises(ports.PortError, match="only 0 of 1"):
        ports.pick_free(1, taken=[first])


def test_taken_port_is_not_free(taken_port: int) -> None:
    """A port that something listens on is not free, and is again when that ends."""
    assert not ports.is_free(taken_port)


def test_waiting_tells_which_ports_stay_taken(taken_port: int) -> None:
    """Waiting for ports to close returns those that did not."""
    free = ports.pick_free(1)[0]
    assert ports.wait_free([free, taken_port], timeout_s=0) == [taken_port]


def test_connections_that_linger_do_not_block_a_port() -> None:
    """A server that has just closed its connections can be restarted on its port."""
    with socket.create_server((ports.LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection((ports.LOOPBACK, port))
        accepted, _ = server.accept()
        # The side that closes first is the one that lingers.
        accepted.close()
        client.close()
    assert ports.is_free(port)
