"""What every kvtide service shares: settings, logs, clocks, errors, the gRPC server."""

from kvtide.runtime.clock import Clock, ManualClock, SystemClock
from kvtide.runtime.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    KvtideError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from kvtide.runtime.grpc_options import (
    CHANNEL_OPTIONS,
    MAX_MESSAGE_BYTES,
    SERVER_OPTIONS,
    open_channel,
)
from kvtide.runtime.grpc_server import GrpcServer, GrpcService, start_grpc_server
from kvtide.runtime.load import SettingsError, load_settings
from kvtide.runtime.log import configure_logging, get_logger
from kvtide.runtime.rpc_errors import error_from_rpc, status_errors
from kvtide.runtime.settings import (
    GrpcSettings,
    HealthSettings,
    HttpSettings,
    LogSettings,
    RegistrySettings,
    RouterSettings,
    Settings,
)

__all__ = [
    "CHANNEL_OPTIONS",
    "MAX_MESSAGE_BYTES",
    "SERVER_OPTIONS",
    "Clock",
    "DeadlineExceeded",
    "FailedPrecondition",
    "GrpcServer",
    "GrpcService",
    "GrpcSettings",
    "HealthSettings",
    "HttpSettings",
    "Internal",
    "InvalidArgument",
    "KvtideError",
    "LogSettings",
    "ManualClock",
    "NotFound",
    "RegistrySettings",
    "ResourceExhausted",
    "RouterSettings",
    "Settings",
    "SettingsError",
    "SystemClock",
    "Unavailable",
    "configure_logging",
    "error_from_rpc",
    "get_logger",
    "load_settings",
    "open_channel",
    "start_grpc_server",
    "status_errors",
]
