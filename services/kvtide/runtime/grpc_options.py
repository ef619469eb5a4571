"""gRPC channel and server options that both ends of a kvtide stream must agree on.

Keepalive has to be set on both sides: a server that does not expect pings answers a client's
with "too_many_pings" and drops the connection.
"""

from __future__ import annotations

import grpc

__all__ = ["CHANNEL_OPTIONS", "MAX_MESSAGE_BYTES", "SERVER_OPTIONS", "open_channel"]

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_KEEPALIVE_INTERVAL_MS = 10_000
_KEEPALIVE_TIMEOUT_MS = 5_000

_COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _KEEPALIVE_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON_OPTIONS,
    # Half of the clients' interval, so that jitter is never taken for abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_INTERVAL_MS // 2),
    # A port that is taken must be an error, not a second server that gets every other call.
    ("grpc.so_reuseport", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON_OPTIONS,
    # Control-plane restarts take seconds: the default back-off of up to 2 min outlives leases.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """An insecure channel to `address` ("host:port") with kvtide's options.

    Connects on first use and reconnects by itself. The caller closes it.
    """
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
