"""The router: the data plane that agents talk to.

A *turn* is one request of a conversation: claim a lease on what the last turn left on its decode
engine, let prefill read it back, let decode answer, relay the answer, settle the claim.
"""

from kvtide.router.http import TURN_HEADER, RouterHttp, start_http
from kvtide.router.identity import SESSION_HEADER
from kvtide.router.report import TurnReport
from kvtide.router.requests import READBACK_HEADER
from kvtide.router.router import Router
from kvtide.router.servicer import SERVICE_NAME, add_router_service, router_service

__all__ = [
    "READBACK_HEADER",
    "SERVICE_NAME",
    "SESSION_HEADER",
    "TURN_HEADER",
    "Router",
    "RouterHttp",
    "TurnReport",
    "add_router_service",
    "router_service",
    "start_http",
]
