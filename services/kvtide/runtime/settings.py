"""Every setting of every service, in one model.

Sources, strongest first: command-line flags (`--section.field`), environment
(`KVTIDE_<SECTION>__<FIELD>`), a TOML file (`[section]`), the defaults below. All services read
the same model, so that one file can serve a whole deployment; each looks at its own sections.
`kvtide.runtime.load` does the loading.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvtide.runtime.address import DialAddress, ListenAddress

__all__ = [
    "GrpcSettings",
    "HealthSettings",
    "HttpSettings",
    "LogSettings",
    "RegistrySettings",
    "RouterSettings",
    "Settings",
]

_PREFILL_READ_MARGIN_S = 5.0
"""vLLM's prefill side declines a read that would start within this time of the expiry."""


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class LogSettings(_Section):
    """What is logged, and how it looks."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""
    format: Literal["auto", "json", "console"] = "auto"
    """json: one object a line; console: for people; auto: console on a terminal, else json."""


class GrpcSettings(_Section):
    """The gRPC server of a service."""

    listen: ListenAddress = "127.0.0.1:7400"
    """Address that the gRPC server listens on, as host:port; port 0 takes any free port."""


class HttpSettings(_Section):
    """The OpenAI-compatible HTTP server of the router."""

    listen: ListenAddress = "127.0.0.1:8000"
    """Address that the HTTP server listens on, as host:port; port 0 takes any free port."""


class RegistrySettings(_Section):
    """The block-lease registry."""

    address: DialAddress = ""
    """gRPC address of the registry that a router uses, as host:port; empty: in this process."""
    claim_limit_s: float = Field(default=60.0, gt=0)
    """Longest time that one claim stands, in seconds."""
    claim_min_left_s: float = Field(default=10.0, gt=0)
    """A lease with less time left than this, in seconds, is not offered."""
    grant_wait_s: float = Field(default=0.25, ge=0)
    """How long a claim waits for a grant that is known to be on its way, in seconds."""
    grant_wait_limit_s: float = Field(default=0.5, ge=0)
    """Longest such wait that a caller may ask for, in seconds."""
    inventory_interval_s: float = Field(default=30.0, gt=0)
    """How often engines re-report everything that they pin, in seconds."""
    sweep_interval_s: float = Field(default=1.0, gt=0)
    """How often deadlines are looked at, in seconds."""
    keep_ended_s: float = Field(default=60.0, ge=0)
    """How long an ended lease stays on record, in seconds."""

    @model_validator(mode="after")
    def _times_fit(self) -> Self:
        shortest_s = _PREFILL_READ_MARGIN_S + 1
        if self.claim_min_left_s < shortest_s:
            message = (
                f"claim_min_left_s = {self.claim_min_left_s:g} is too short: prefill engines "
                f"decline to read within {_PREFILL_READ_MARGIN_S:g} s of a lease's end, "
                f"so make it {shortest_s:g} or more"
            )
            raise ValueError(message)
        if self.claim_limit_s < self.claim_min_left_s:
            message = (
                f"claim_limit_s = {self.claim_limit_s:g} is shorter than "
                f"claim_min_left_s = {self.claim_min_left_s:g}: claims would run out before a "
                "read could start; make it longer"
            )
            raise ValueError(message)
        if self.grant_wait_s > self.grant_wait_limit_s:
            message = (
                f"grant_wait_s = {self.grant_wait_s:g} is longer than "
                f"grant_wait_limit_s = {self.grant_wait_limit_s:g}; make it shorter"
            )
            raise ValueError(message)
        return self


class HealthSettings(_Section):
    """Node health: which engines are alive."""

    address: DialAddress = ""
    """gRPC address of the node health that a router uses, as host:port; empty: in this process."""
    report_interval_s: float = Field(default=1.0, gt=0)
    """How often engines send a heartbeat, in seconds."""
    suspect_after_missed: int = Field(default=3, ge=1)
    """An engine gets no new turns after missing this many heartbeats in a row."""
    down_after_s: float = Field(default=12.0, gt=0)
    """An engine that was silent for this long, in seconds, is down and its leases are lost."""
    forget_down_after_s: float = Field(default=600.0, ge=0)
    """A down engine is dropped from the list after this long, in seconds."""

    @model_validator(mode="after")
    def _suspect_before_down(self) -> Self:
        suspect_after_s = self.suspect_after_missed * self.report_interval_s
        if suspect_after_s >= self.down_after_s:
            message = (
                f"down_after_s = {self.down_after_s:g} is not longer than suspect_after_missed x "
                f"report_interval_s = {suspect_after_s:g}: engines would be down before they are "
                "suspect; make it longer"
            )
            raise ValueError(message)
        return self


class RouterSettings(_Section):
    """The router: turns, from the client's request to the last byte of the answer."""

    readback_enabled: bool = True
    """Let prefill read earlier turns back from decode; false serves every turn by plain prefill."""
    max_body_bytes: int = Field(default=16 * 1024 * 1024, gt=0)
    """Largest request body that is accepted, in bytes."""
    claim_timeout_s: float = Field(default=1.0, gt=0)
    """How long a turn waits for the registry, in seconds, before it goes on without a lease."""
    prefill_timeout_s: float = Field(default=600.0, gt=0)
    """Longest prefill leg of a turn, in seconds."""
    decode_idle_timeout_s: float = Field(default=600.0, gt=0)
    """Longest silence of a decode engine in the middle of an answer, in seconds."""
    drain_timeout_s: float = Field(default=30.0, ge=0)
    """How long a stopping router lets running turns finish, in seconds."""
    turn_history: int = Field(default=256, ge=1)
    """How many turn reports are kept for GET /kvtide/turns."""


class Settings(BaseModel):
    """All settings. Building it in code reads neither environment nor files."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    log: LogSettings = LogSettings()
    grpc: GrpcSettings = GrpcSettings()
    http: HttpSettings = HttpSettings()
    registry: RegistrySettings = RegistrySettings()
    health: HealthSettings = HealthSettings()
    router: RouterSettings = RouterSettings()

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        if self.router.claim_timeout_s <= self.registry.grant_wait_s:
            message = (
                f"router.claim_timeout_s = {self.router.claim_timeout_s:g} is not longer than "
                f"registry.grant_wait_s = {self.registry.grant_wait_s:g}: a claim that waits for "
                "its grant would never be heard; make it longer"
            )
            raise ValueError(message)
        return self
