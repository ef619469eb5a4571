"""A random world of engines, readers and restarts, in which no read is ever unsafe.

Engines, registries and streams come and go at any moment while readers are at work; the
table under test decides who may read what, and `World` knows what would be wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtide.registry.domain import LeaseTable
from kvtide.registry.events import EndCause, Ended, EngineReport
from tests.registry.world import KEYS, NODES, READ_TAKES_S, RULES, Reader, World

if TYPE_CHECKING:
    from kvtide.registry.ports import ConversationKey


class LeaseHistories(World, RuleBasedStateMachine):
    # ---- what can happen

    @rule(duration_s=st.sampled_from([0.4, 1.5, 4.0, 19.0, 41.0, 61.0, 410.0]))
    def time_passes(self, duration_s: float) -> None:
        self.let_time_pass(duration_s)

    @rule(limit=st.sampled_from([1, 1000]))
    def sweep(self, limit: int) -> None:
        self.carry_out(self.table.sweep(self.now_s, limit)[0])

    @rule(key=st.sampled_from(KEYS))
    def open_turn(self, key: ConversationKey) -> None:
        result, effects = self.table.open_turn(key, f"claim-{self.unique()}", self.now_s)
        self.carry_out(effects)
        assert result.generation > self.newest.get(key, 0), "a generation was issued twice"
        self.newest[key] = result.generation
        self.turns.append((key, result.generation))
        claimed = result.claimed
        if claimed is None:
            assert result.miss_reason
            return
        self.check_claim(key, claimed)
        self.readers.append(Reader(key, result.generation, claimed))

    @rule(data=st.data(), takes_s=st.sampled_from([0.0, READ_TAKES_S]))
    @precondition(lambda self: any(self.may_start(reader) for reader in self.readers))
    def read(self, data: st.DataObject, takes_s: float) -> None:
        able = [reader for reader in self.readers if self.may_start(reader)]
        self.read_by(data.draw(st.sampled_from(able)), takes_s)

    @rule(data=st.data(), sure=st.sampled_from([True, True, False]), grant_expected=st.booleans())
    @precondition(lambda self: self.readers)
    def settle(self, data: st.DataObject, *, sure: bool, grant_expected: bool) -> None:
        reader = data.draw(st.sampled_from(self.readers[-3:]))
        self.settle_by(reader, sure=sure, grant_expected=grant_expected)

    @rule(
        data=st.data(),
        node=st.sampled_from(NODES),
        ttl_s=st.sampled_from([12.0, 30.0, 480.0, 480.0]),
        at_once=st.sampled_from([True, True, False]),
    )
    @precondition(lambda self: self.turns)
    def decode_finishes(
        self, data: st.DataObject, node: str, ttl_s: float, *, at_once: bool
    ) -> None:
        # The newest turn more often than one that was overtaken.
        index = data.draw(st.sampled_from([-1, -1, -1, 0]))
        self.finish(node, *self.turns.pop(index), ttl_s)
        if at_once:
            self.hand_over_all(self.engines[node])

    @rule(key=st.sampled_from(KEYS), node=st.sampled_from(NODES))
    def whole_turn(self, key: ConversationKey, node: str) -> None:
        """The usual course of things: claim, read, settle, grant."""
        self.open_turn(key)
        reader = self.readers[-1] if self.readers else None
        if reader is not None and (reader.key, reader.generation) == self.turns[-1]:
            self.read_by(reader, 0.0)
            self.settle_by(reader, sure=True, grant_expected=True)
        self.finish(node, *self.turns.pop(), 480.0)
        self.hand_over_all(self.engines[node])

    @rule(key=st.sampled_from(KEYS))
    def close(self, key: ConversationKey) -> None:
        self.carry_out(self.table.close(key, self.now_s))

    @rule(node=st.sampled_from(NODES), all_of_them=st.booleans())
    @precondition(lambda self: any(engine.to_registry for engine in self.engines.values()))
    def messages_arrive(self, node: str, *, all_of_them: bool) -> None:
        engine = self.engines[node]
        if all_of_them:
            self.hand_over_all(engine)
        elif engine.to_registry:
            self.hand_over(engine, engine.to_registry.pop(0)[1])

    @rule(node=st.sampled_from(NODES))
    @precondition(lambda self: any(e.undelivered_of_old_streams for e in self.engines.values()))
    def message_of_an_old_stream_arrives(self, node: str) -> None:
        engine = self.engines[node]
        if engine.undelivered_of_old_streams:
            stream, report = engine.undelivered_of_old_streams.pop(0)
            self.carry_out(self.table.report(node, stream, report, self.now_s))
            self.carry_out(self.table.detach(node, stream, self.now_s))

    @rule(node=st.sampled_from(NODES))
    @precondition(lambda self: any(engine.to_engine for engine in self.engines.values()))
    def release_arrives(self, node: str) -> None:
        engine = self.engines[node]
        if engine.to_engine:
            request = engine.to_engine.pop(0)
            self.assert_nobody_reads(request)
            if request in engine.pins:
                self.free(engine, request, EndCause.RELEASED)
            else:
                self.send(engine, EngineReport(ended=(Ended(request, EndCause.RELEASED),)))

    @rule(node=st.sampled_from(NODES))
    def inventory_is_sent(self, node: str) -> None:
        self.send(self.engines[node], self.inventory(self.engines[node]))

    @rule(
        node=st.sampled_from(NODES),
        what=st.sampled_from(["stream", "engine", "engine, unnoticed", "registry", "new stream"]),
        back=st.sampled_from([True, True, False]),
    )
    def something_breaks(self, node: str, what: str, *, back: bool) -> None:
        """One rule for all trouble, so that there is time for turns between it."""
        engine = self.engines[node]
        if what == "registry":
            self.restart_registry(back=back)
        elif what == "new stream":
            self.attach(engine)
        else:
            if engine.stream is not None and what != "engine, unnoticed":
                self.carry_out(self.table.detach(node, engine.stream, self.now_s))
            if what != "stream":
                self.restart(engine)
            self.lose_stream(engine)
            if back:
                self.attach(engine)

    @rule(node=st.sampled_from(NODES))
    @precondition(lambda self: any(engine.stream is None for engine in self.engines.values()))
    def engine_attaches(self, node: str) -> None:
        self.attach(self.engines[node])

    def restart_registry(self, *, back: bool) -> None:
        self.floor = max([self.floor, *self.newest.values()]) + 1
        self.table = LeaseTable(RULES, generation_floor=self.floor, now_s=self.now_s)
        for engine in self.engines.values():
            self.lose_stream(engine)
            engine.undelivered_of_old_streams.clear()
            if back:
                self.attach(engine)

    # ---- what always holds

    @invariant()
    def nothing_is_pinned_for_longer_than_it_was_granted(self) -> None:
        for engine in self.engines.values():
            for pin in engine.pins.values():
                assert self.now_s <= pin.free_at_s - engine.clock_offset_s

    @invariant()
    def at_most_one_claim_stands_on_a_lease(self) -> None:
        for lease in self.table._book.by_serial.values():
            assert (lease.claim is not None) == (lease.state == "claimed")
            assert lease.ended == (lease.pinned is None)

    def teardown(self) -> None:
        """Left alone, every grant ends and the registry forgets everything."""
        for duration_s in (600.0, 100.0, 3600.0, 3600.0, 3600.0):
            self.let_time_pass(duration_s)
            self.carry_out(self.table.sweep(self.now_s, 100_000)[0])
        assert all(not engine.pins for engine in self.engines.values())
        assert self.table._book.by_serial == {}
        assert self.table._conversations == {}


TestLeaseHistories = pytest.mark.timeout(300)(LeaseHistories.TestCase)
TestLeaseHistories.__doc__ = "In every random history no read is unsafe, and every grant ends."
TestLeaseHistories.settings = settings(max_examples=250, stateful_step_count=60, deadline=None)
