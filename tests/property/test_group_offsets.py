"""Tests of a group's committed offsets: they advance, and only permitted callers move them back. A member that lost a
queue cannot change the queue's committed offset."""

from __future__ import annotations

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.core.broker.offsets import Owners
from actors.core.broker.snapshot import dump_snapshot, load_snapshot
from actors.core.broker.state import BrokerState
from raymq.common.protocol.group import OffsetCommit, QueueOffset
from storage.files.config_files import parse_fastjson
from tests.support.cases import examples

OFFSETS = st.integers(0, 50)
MEMBERS = st.integers(0, 3)


class CommittedOffsets(RuleBasedStateMachine):
    """State machine of one group's committed offset. Members take a queue from each other, commit, seek and die.
    Offsets are reset, and the broker restarts.

    `held` has each member's view of the queue, generation and reset version. A member may still believe that it owns a
    queue that it lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state, self.owners = BrokerState(), Owners()
        self.apply(self.state.decide_topic("t", 1, 1))
        for change in self.state.decide_group("g"):
            self.apply(change)
        self.generation = 0
        self.held: dict[int, tuple[int, int]] = {}
        self.owner: int | None = None
        self.noted = 0

    def apply(self, change) -> None:
        if change is not None:
            self.state.apply(change, 0)

    @property
    def now(self) -> QueueOffset | None:
        return self.state.offsets.get("g", "t", 0)

    @rule(member=MEMBERS, start=OFFSETS)
    def take_over(self, member: int, start: int) -> None:
        self.generation += 1
        before = self.now
        self.apply(self.state.decide_starts("g", "t", {0: start}))
        self.owners.note("g", "t", 0, self.generation)
        assert self.now is not None
        assert before in (None, self.now), "a start moves nothing that is committed"
        self.held[member] = (self.generation, self.now.reset_version)
        self.owner, self.noted = member, self.generation

    @precondition(lambda self: self.held)
    @rule(data=st.data(), offset=st.none() | OFFSETS, backwards=st.booleans())
    def commit(self, data: st.DataObject, offset: int | None, backwards: bool) -> None:
        member = data.draw(st.sampled_from(sorted(self.held)))
        generation, version = self.held[member]
        before, current = self.now, self.state.offsets.version("g", "t", 0)
        commits = {"t": {0: OffsetCommit(offset, generation, version, backwards)}}
        changes, verdicts, gone = self.state.decide_commits(self.owners, "g", commits)
        for change in changes:
            self.apply(change)
        assert not gone
        verdict = verdicts["t"]
        if generation < self.noted:
            assert verdict.fenced == [0]
            assert self.now == before, "who lost the queue changes nothing"
        elif version < current:
            assert verdict.reset == {0: before or QueueOffset(0, current)}
            assert self.now == before, "who does not know of the reset changes nothing"
            self.held[member] = (generation, current)
        elif offset is None:
            assert self.now == before
        else:
            expected = offset if before is None or backwards else max(before.queue_offset, offset)
            assert self.now is not None
            assert self.now.queue_offset == expected
        self.noted = max(self.noted, generation)

    @rule(offset=OFFSETS)
    def reset(self, offset: int) -> None:
        version = self.state.offsets.version("g", "t", 0)
        self.apply(self.state.decide_reset("g", "t", {0: offset}))
        assert self.now == QueueOffset(offset, version + 1)

    @rule()
    def make_the_topic_again(self) -> None:
        version = self.state.offsets.version("g", "t", 0)
        self.apply(self.state.decide_topic_delete("t"))
        self.owners.forget(topic="t")
        self.apply(self.state.decide_topic("t", 1, 1))
        self.noted = 0
        assert self.now is None
        assert self.state.offsets.version("g", "t", 0) > version

    @rule()
    def restart_the_broker(self) -> None:
        before = self.state
        self.state, _ = load_snapshot(dump_snapshot(before, 0).get, parse_fastjson)
        assert self.state == before
        self.owners, self.noted = Owners(), 0

    @invariant()
    def versions_never_go_back(self) -> None:
        version = self.state.offsets.version("g", "t", 0)
        assert version >= getattr(self, "version", 0)
        self.version = version


TestCommittedOffsets = CommittedOffsets.TestCase
TestCommittedOffsets.settings = settings(max_examples=examples(300), stateful_step_count=30, deadline=None)
