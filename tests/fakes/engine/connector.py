"""What the engine core asks of a KV connector, and the connector of an engine without one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tests.fakes.engine.request import EngineRequest


@dataclass(slots=True)
class StepResults:
    """Transfers that ended since the last step."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    """Those of ``finished_recving`` that brought nothing."""
    error: BaseException | None = None
    """What a worker's step raised; it kills the engine."""


class Connector(Protocol):
    """vLLM's connector interface, scheduler and worker side in one.

    Each step calls ``match`` and ``allocated`` for the requests it admits, then
    ``start_loads``, then ``collect`` and ``update_output``.
    """

    def on_new_request(self, request: EngineRequest) -> None:
        """A request has arrived."""
        ...

    def match(self, request: EngineRequest, computed_tokens: int) -> tuple[int, bool]:
        """Tokens loadable beyond ``computed_tokens``, and whether they load between steps."""
        ...

    def allocated(self, request: EngineRequest, external_tokens: int) -> None:
        """The request has its blocks; ``external_tokens`` of them are to be loaded."""
        ...

    def rejected(self, params: dict[str, Any]) -> None:
        """A request that was to read from prefill was refused at admission."""
        ...

    def finished(self, request: EngineRequest) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks stay, and the answer's ``kv_transfer_params``."""
        ...

    def start_loads(self) -> None:
        """Begin what was asked for since the last step. Must not wait."""
        ...

    def collect(self) -> StepResults:
        """What has ended since the last step, expired pins included."""
        ...

    def update_output(self, results: StepResults) -> None:
        """The scheduler side learns what ``collect`` reported."""
        ...

    def has_work(self) -> bool:
        """Whether steps are needed although no request waits for one."""
        ...


class NoConnector:
    """An engine that neither sends nor receives KV."""

    def on_new_request(self, request: EngineRequest) -> None:
        """Nothing to note."""

    def match(self, request: EngineRequest, computed_tokens: int) -> tuple[int, bool]:
        """Nothing is loadable."""
        return 0, False

    def allocated(self, request: EngineRequest, external_tokens: int) -> None:
        """Nothing to load."""

    def rejected(self, params: dict[str, Any]) -> None:
        """Nothing to tell anybody."""

    def finished(self, request: EngineRequest) -> tuple[bool, dict[str, Any] | None]:
        """Nothing stays."""
        return False, None

    def start_loads(self) -> None:
        """Nothing to begin."""

    def collect(self) -> StepResults:
        """Nothing ends."""
        return StepResults()

    def update_output(self, results: StepResults) -> None:
        """Nothing to learn."""

    def has_work(self) -> bool:
        """Never."""
        return False
