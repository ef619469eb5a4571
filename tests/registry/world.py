"""A plain model of what surrounds the lease table: engines, messages and readers.

Engines pin, expire and free on their own clocks; messages take up to MESSAGE_DELAY_S, and
are lost with their stream; reads take up to READ_TAKES_S and start only while their
handle's expiry is far enough away, as in prefill engines. The model asserts, wherever it
can see it, that nothing which the table under test decides lets anybody read wrongly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtide.registry.domain import LeaseTable
from kvtide.registry.events import EndCause, Ended, EngineReport, Grant, SendRelease
from kvtide.registry.ports import ClaimedLease, ConversationKey, ReadOutcome, Settlement
from kvtide.registry.rules import LeaseRules
from tests.registry.support import make_grant

if TYPE_CHECKING:
    from kvtide.registry.events import Effect

MESSAGE_DELAY_S = 2.0
READ_TAKES_S = 2.5
READ_MARGIN_S = 5.0
RULES = LeaseRules()
GRACE_S = RULES.pin_grace_s
KEYS = [ConversationKey("t", "a"), ConversationKey("t", "b")]
NODES = ["d1", "d2"]


@dataclass
class Pin:
    key: ConversationKey
    generation: int
    free_at_s: float
    """By this engine's clock; readers may start until GRACE_S earlier."""


@dataclass
class Engine:
    """A decode engine: the only authority over its blocks."""

    node: str
    clock_offset_s: float
    epoch: str = ""
    stream: int | None = None
    pins: dict[str, Pin] = field(default_factory=dict)
    to_registry: list[tuple[float, EngineReport]] = field(default_factory=list)
    to_engine: list[str] = field(default_factory=list)
    undelivered_of_old_streams: list[tuple[int, EngineReport]] = field(default_factory=list)


@dataclass
class Reader:
    """A turn that holds a claim."""

    key: ConversationKey
    generation: int
    claimed: ClaimedLease
    done: bool = False
    """It read, or is sure never to."""
    has_read: bool = False
    finishes_s: float | None = None
    """When the read that is going on will be finished."""


class World:
    """The engines and readers around one registry, and the registry's table."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.serial = 0
        self.floor = 1
        self.readers: list[Reader] = []
        self.turns: list[tuple[ConversationKey, int]] = []
        self.engines = {
            node: Engine(node, offset) for node, offset in zip(NODES, (7e3, -9e4), strict=True)
        }
        self.table = LeaseTable(RULES, generation_floor=1)
        self.newest: dict[ConversationKey, int] = {}
        for engine in self.engines.values():
            self.restart(engine)
            self.attach(engine)

    def unique(self) -> int:
        self.serial += 1
        return self.serial

    def engine_now_s(self, engine: Engine) -> float:
        return self.now_s + engine.clock_offset_s

    def restart(self, engine: Engine) -> None:
        engine.epoch = f"{engine.node}-epoch-{self.unique()}"
        engine.pins.clear()

    def lose_stream(self, engine: Engine) -> None:
        engine.stream = None
        engine.to_registry.clear()
        engine.to_engine.clear()

    def attach(self, engine: Engine) -> None:
        if engine.stream is not None:
            engine.undelivered_of_old_streams += [
                (engine.stream, report) for _, report in engine.to_registry
            ]
        self.lose_stream(engine)
        engine.stream = self.unique()
        effects = self.table.attach(engine.node, engine.epoch, engine.stream, self.now_s)
        self.carry_out(effects)
        self.hand_over(engine, self.inventory(engine))

    def inventory(self, engine: Engine) -> EngineReport:
        return EngineReport(
            inventory=tuple(self.grant_of(engine, request) for request in engine.pins)
        )

    def grant_of(self, engine: Engine, request: str) -> Grant:
        pin = engine.pins[request]
        return make_grant(
            pin.key,
            pin.generation,
            request,
            epoch=engine.epoch,
            time_left_s=max(0.0, pin.free_at_s - GRACE_S - self.engine_now_s(engine)),
            expiry_s=pin.free_at_s,
        )

    def send(self, engine: Engine, report: EngineReport) -> None:
        if engine.stream is not None:
            engine.to_registry.append((self.now_s, report))

    def hand_over(self, engine: Engine, report: EngineReport) -> None:
        assert engine.stream is not None
        self.carry_out(self.table.report(engine.node, engine.stream, report, self.now_s))

    def free(self, engine: Engine, request: str, cause: EndCause) -> None:
        del engine.pins[request]
        self.send(engine, EngineReport(ended=(Ended(request, cause),)))

    def may_start(self, reader: Reader) -> bool:
        engine = self.engines[reader.claimed.node_id]
        expiry_s = reader.claimed.handle.engine_clock_expiry_s
        assert expiry_s is not None
        return (
            not reader.done
            and reader.finishes_s is None
            and engine.epoch == reader.claimed.handle.engine_id
            and self.engine_now_s(engine) < expiry_s - READ_MARGIN_S
        )

    def may_still_read(self, reader: Reader) -> bool:
        """Whether a read under this claim goes on, or may yet start."""
        return self.may_start(reader) or reader.finishes_s is not None

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendRelease):
                self.assert_nobody_reads(effect.request_id)
                engine = self.engines[effect.node_id]
                if engine.stream is not None and engine.epoch == effect.epoch:
                    engine.to_engine.append(effect.request_id)

    def assert_nobody_reads(self, request: str) -> None:
        for reader in self.readers:
            if reader.claimed.handle.request_id == request:
                assert not self.may_still_read(reader), "a claimed lease was released"

    def let_time_pass(self, duration_s: float) -> None:
        """Move the clock from one thing that happens by itself to the next."""
        end_s = self.now_s + duration_s
        while (next_s := self.next_event_s()) <= end_s:
            self.now_s = max(self.now_s, next_s)
            self.do_what_is_due()
        self.now_s = end_s

    def next_event_s(self) -> float:
        times = [reader.finishes_s for reader in self.readers if reader.finishes_s is not None]
        for engine in self.engines.values():
            times += [sent_s + MESSAGE_DELAY_S for sent_s, _ in engine.to_registry[:1]]
            times += [pin.free_at_s - engine.clock_offset_s for pin in engine.pins.values()]
        return min(times, default=math.inf)

    def do_what_is_due(self) -> None:
        for reader in self.readers:
            if reader.finishes_s is not None and reader.finishes_s <= self.now_s:
                self.finish_read(reader)
        for engine in self.engines.values():
            if engine.to_registry and engine.to_registry[0][0] + MESSAGE_DELAY_S <= self.now_s:
                self.hand_over(engine, engine.to_registry.pop(0)[1])
            for request, pin in list(engine.pins.items()):
                if pin.free_at_s - engine.clock_offset_s <= self.now_s:
                    self.free(engine, request, EndCause.EXPIRED)

    def check_claim(self, key: ConversationKey, claimed: ClaimedLease) -> None:
        engine = self.engines[claimed.node_id]
        request = claimed.handle.request_id
        for reader in self.readers:
            if reader.claimed.handle.request_id == request:
                assert not self.may_still_read(reader), "two readers of one lease"
        if engine.epoch != claimed.handle.engine_id:
            return  # Restarted, and the registry has not heard of it: the handshake will refuse.
        assert engine.stream is not None, "offered from an engine without a stream"
        if not engine.to_registry:
            assert request in engine.pins, "offered what the engine said it freed"
        pin = engine.pins.get(request)
        if pin is None:
            return
        assert pin.key == key
        assert pin.generation == claimed.generation
        expiry_s = claimed.handle.engine_clock_expiry_s
        assert expiry_s is not None
        assert expiry_s <= pin.free_at_s - GRACE_S, "a reader was given more than was granted"
        left_s = expiry_s - self.engine_now_s(engine)
        assert left_s <= claimed.claim_time_left_s + 1e-6
        freed_in_s = pin.free_at_s - self.engine_now_s(engine)
        assert RULES.claim_min_left_s - 1e-6 <= claimed.claim_time_left_s <= freed_in_s

    def read_by(self, reader: Reader, takes_s: float) -> None:
        if self.may_start(reader):
            self.assert_pinned(reader)
            reader.finishes_s = self.now_s + takes_s
            if not takes_s:
                self.finish_read(reader)

    def finish_read(self, reader: Reader) -> None:
        engine = self.engines[reader.claimed.node_id]
        reader.finishes_s = None
        reader.done = True
        if engine.epoch != reader.claimed.handle.engine_id:
            return  # The engine died under the read, which fails.
        self.assert_pinned(reader)
        reader.has_read = True
        self.free(engine, reader.claimed.handle.request_id, EndCause.READ)

    def assert_pinned(self, reader: Reader) -> None:
        engine = self.engines[reader.claimed.node_id]
        request = reader.claimed.handle.request_id
        assert request in engine.pins, "UNSAFE READ: the engine has freed these blocks"

    def settle_by(self, reader: Reader, *, sure: bool, grant_expected: bool) -> None:
        if not sure or reader.finishes_s is not None:
            outcome = ReadOutcome.UNKNOWN
        else:
            outcome = ReadOutcome.READ if reader.has_read else ReadOutcome.NOT_READ
            reader.done = True
        settlement = Settlement(
            reader.key, reader.generation, reader.claimed.claim_id, outcome, grant_expected
        )
        self.carry_out(self.table.settle(settlement, self.now_s))

    def finish(self, node: str, key: ConversationKey, generation: int, ttl_s: float) -> None:
        engine = self.engines[node]
        request = f"request-{self.unique()}"
        engine.pins[request] = Pin(key, generation, self.engine_now_s(engine) + ttl_s + GRACE_S)
        self.send(engine, EngineReport(grants=(self.grant_of(engine, request),)))

    def hand_over_all(self, engine: Engine) -> None:
        while engine.to_registry:
            self.hand_over(engine, engine.to_registry.pop(0)[1])
