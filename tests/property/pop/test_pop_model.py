"""Tests of the leases of simple consumers, compared with a simple model. The tests draw random receives,
acknowledgements, clock changes and failovers.

For each offset, the model stores whether the message is complete (settled), until when it is invisible, and how often
it was delivered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.strategies import booleans, data, integers, sampled_from, sets

from actors.core.broker.snapshot import dump_snapshot, load_snapshot
from actors.core.broker.state import BrokerState, Change, decode_change, encode_change
from actors.core.pop.receive import available, decide_receive, next_due_ms
from actors.core.pop.settle import decide_ack, decide_extend, decide_invisible
from raymq.common.protocol.pop import LeasedRange, LeasePart, ReceiveRequest
from raymq.common.protocol.store import QueueEnds
from storage.files.config_files import parse_fastjson

GROUP, TOPIC = "g", "orders"
QUEUES = 2


@dataclass
class OffsetState:
    """The model's state of one message. The message was delivered `attempts` times, last in the lease `receipt`, and is
    invisible until `visible_ms`."""

    attempts: int = 0
    visible_ms: int = 0
    receipt: tuple[int, int] = (-1, -1)
    settled: bool = False
    gone: bool = False
    """True if retention has deleted the message."""

    @property
    def open(self) -> bool:
        return not self.settled and not self.gone


@dataclass
class HeldLease:
    """A lease that a consumer received: the granted offset range, and the offsets of the messages in the range."""

    given: LeasedRange
    offsets: list[int] = field(default_factory=list)


def offsets_of(given: LeasedRange) -> list[int]:
    without = int(given.without, 16)
    return [given.start + i for i in range(given.count) if not without >> i & 1]


class PopModel(RuleBasedStateMachine):
    @initialize(ordered=booleans())
    def start(self, ordered: bool) -> None:
        self.ordered = ordered
        self.now_ms = 1_700_000_000_000
        self.state = BrokerState()
        self.log: list[bytes] = []
        self.snapshots: list[tuple[dict[str, str], int]] = [(dump_snapshot(self.state, 0), 0)]
        for change in (*self.state.decide_group(GROUP), self.state.decide_topic(TOPIC, QUEUES, QUEUES)):
            assert change is not None
            self.store(change)
        self.ends = dict.fromkeys([(TOPIC, q) for q in range(QUEUES)], QueueEnds(0, 0))
        self.queues: dict[int, list[OffsetState]] = {q: [] for q in range(QUEUES)}
        self.held: list[HeldLease] = []

    def store(self, change: Change) -> None:
        body = encode_change(change)
        self.log.append(body)
        self.state.apply(decode_change(body), self.now_ms)

    def committed(self, topic: str, queue_id: int) -> int:
        return self.state.committed(GROUP, topic, queue_id)

    @rule(queue_id=integers(0, QUEUES - 1), count=integers(1, 20))
    def send(self, queue_id: int, count: int) -> None:
        known = self.ends[TOPIC, queue_id]
        self.ends[TOPIC, queue_id] = QueueEnds(known.min_offset, known.max_offset + count)
        self.queues[queue_id] += [OffsetState() for _ in range(count)]

    @rule(ms=integers(0, 3000))
    def time_passes(self, ms: int) -> None:
        self.now_ms += ms

    @rule(most=integers(1, 15), invisible_ms=integers(100, 2000))
    def receive(self, most: int, invisible_ms: int) -> None:
        request = ReceiveRequest(GROUP, (TOPIC,), most, invisible_ms, ordered=self.ordered)
        queues = [(TOPIC, q) for q in range(QUEUES)]
        there = available(self.state.pop, self.committed, queues, self.ends, request, self.now_ms)
        handout = decide_receive(self.state.pop, self.committed, queues, self.ends, request, self.now_ms)
        blocked = {q for q in self.queues if self.ordered and self.in_flight(q)}
        wanted = sum(self.free(q) for q in self.queues if q not in blocked)
        if handout.change is not None:
            self.store(handout.change)
        got = 0
        for given in handout.ranges:
            assert given.queue_id not in blocked
            assert (given.invisible_ms, given.topic) == (invisible_ms, TOPIC)
            offsets = offsets_of(given)
            got += len(offsets)
            for offset in offsets:
                known = self.queues[given.queue_id][offset]
                assert known.open
                assert known.visible_ms <= self.now_ms, "handed out while it was invisible"
                known.attempts += 1
                assert given.attempts == known.attempts
                known.visible_ms = given.pop_ms + given.invisible_ms
                known.receipt = given.start, given.pop_ms
            self.held.append(HeldLease(given, offsets))
        # Until the next receive, the group's state may still count a message that retention has deleted as a delivered
        # message. While such messages exist, the number of received messages cannot be predicted, so it is not checked.
        if not any(one.gone and not one.settled for known in self.queues.values() for one in known):
            assert got == min(most, there)
        if self.ordered:
            self.check_order(handout.ranges)
        assert got >= min(wanted, most), "messages that are free are handed out"

    def check_order(self, ranges: tuple[LeasedRange, ...]) -> None:
        """Check that, in order mode, a message is delivered only together with all earlier unacknowledged messages of
        its queue."""
        for q, known in self.queues.items():
            offsets = [offset for given in ranges if given.queue_id == q for offset in offsets_of(given)]
            if offsets:
                open_ones = [offset for offset in range(max(offsets) + 1) if known[offset].open]
                assert sorted(offsets) == open_ones

    def free(self, queue_id: int) -> int:
        return sum(known.open and known.visible_ms <= self.now_ms for known in self.queues[queue_id])

    def in_flight(self, queue_id: int) -> int:
        return sum(known.open and known.visible_ms > self.now_ms for known in self.queues[queue_id])

    @precondition(lambda self: self.held)
    @rule(data=data(), whole=booleans())
    def ack(self, data: data, whole: bool) -> None:  # type: ignore[valid-type]  # hypothesis' own name
        """Acknowledge some messages of a lease. Some messages may already be acknowledged, or the lease may have
        expired."""
        part, chosen, held = self.choose(data, whole)
        settled = decide_ack(self.state.pop, self.committed, GROUP, [part])
        if settled.change is not None:
            self.store(settled.change)
        there, all_of_lease = self.of_lease(held, chosen)
        for offset in all_of_lease:
            self.queues[part.queue_id][offset].settled = True
        assert len(there) <= settled.count <= len(all_of_lease)

    @precondition(lambda self: self.held)
    @rule(data=data(), invisible_ms=integers(0, 3000), counted=booleans())
    def change_invisible(self, data: data, invisible_ms: int, counted: bool) -> None:  # type: ignore[valid-type]  # as above
        part, chosen, held = self.choose(data, whole=False)
        settled = decide_invisible(
            self.state.pop, self.committed, GROUP, [part], invisible_ms, self.now_ms, counted=counted
        )
        if settled.change is not None:
            self.store(settled.change)
        there, all_of_lease = self.of_lease(held, chosen)
        [lease] = settled.leases
        if lease is None:
            assert not there
            return
        given = LeasedRange(
            *(TOPIC, part.queue_id, lease.start, lease.size, lease.pop_ms, invisible_ms, lease.attempts),
            f"{lease.settled:x}",
        )
        mine = offsets_of(given)
        assert set(there) <= set(mine) <= set(all_of_lease)
        for offset in mine:
            known = self.queues[part.queue_id][offset]
            known.receipt = lease.key
            known.visible_ms = lease.visible_ms
            known.attempts -= not counted
            assert lease.visible_ms >= self.now_ms + invisible_ms
        self.held.append(HeldLease(given, mine))

    @precondition(lambda self: self.held)
    @rule(data=data(), invisible_ms=integers(0, 3000))
    def extend_invisible(self, data: data, invisible_ms: int) -> None:  # type: ignore[valid-type]  # as above
        part, chosen, held = self.choose(data, whole=False)
        settled = decide_extend(self.state.pop, self.committed, GROUP, [part], invisible_ms, self.now_ms)
        if settled.change is not None:
            self.store(settled.change)
        there, all_of_lease = self.of_lease(held, chosen)
        [lease] = settled.leases
        if lease is None:
            assert not there
            return
        assert all_of_lease
        assert lease.visible_ms >= self.now_ms + invisible_ms
        for known in self.queues[part.queue_id]:
            if known.receipt == lease.key and not known.settled:
                assert lease.visible_ms >= known.visible_ms, "no lease becomes shorter"
                known.visible_ms = lease.visible_ms

    def of_lease(self, held: HeldLease, chosen: list[int]) -> tuple[list[int], list[int]]:
        """Return two lists of the offsets in `chosen` that are still in the lease and not acknowledged. The first list
        leaves out the offsets whose messages retention has deleted; the second list contains them, too.

        A message that retention deleted stays in its lease until the next receive from the queue.
        """
        known = self.queues[held.given.queue_id]
        key = held.given.start, held.given.pop_ms
        held_ones = [offset for offset in chosen if not known[offset].settled and known[offset].receipt == key]
        return [offset for offset in held_ones if not known[offset].gone], held_ones

    def choose(self, data: data, whole: bool) -> tuple[LeasePart, list[int], HeldLease]:  # type: ignore[valid-type]  # as above
        held = data.draw(sampled_from(self.held))  # type: ignore[attr-defined]  # as above
        places = TOPIC, held.given.queue_id, held.given.start, held.given.pop_ms
        if whole:
            return LeasePart(*places), held.offsets, held
        chosen = sorted(data.draw(sets(sampled_from(held.offsets), min_size=1)))  # type: ignore[attr-defined]  # as above
        bits = sum(1 << offset - held.given.start for offset in chosen)
        return LeasePart(*places, f"{bits:x}"), chosen, held

    @rule(queue_id=integers(0, QUEUES - 1), data=data())
    def retention(self, queue_id: int, data: data) -> None:  # type: ignore[valid-type]  # as above
        known = self.ends[TOPIC, queue_id]
        first = data.draw(integers(known.min_offset, known.max_offset))  # type: ignore[attr-defined]  # as above
        self.ends[TOPIC, queue_id] = QueueEnds(first, known.max_offset)
        for one in self.queues[queue_id][:first]:
            one.gone = True

    @rule()
    def snapshot(self) -> None:
        self.snapshots.append((dump_snapshot(self.state, len(self.log)), len(self.log)))

    @rule(data=data())
    def failover(self, data: data) -> None:  # type: ignore[valid-type]  # as above
        """Replace the broker by a new broker. The new broker loads a snapshot and replays the records after the
        snapshot, or also some earlier records."""
        files, position = self.snapshots[-1]
        state, read_position = load_snapshot(files.get, parse_fastjson)
        assert read_position == position
        earlier = data.draw(sampled_from([at for _, at in self.snapshots]))  # type: ignore[attr-defined]  # as above
        for body in self.log[earlier:]:
            state.apply(decode_change(body), self.now_ms)
        assert state.pop == self.state.pop
        assert state.offsets == self.state.offsets
        self.state = state

    @invariant()
    def nothing_is_lost(self) -> None:
        """Check that the committed offset does not pass an incomplete message, and that the broker still counts the
        leased messages as in flight."""
        for q, known in self.queues.items():
            first_open = next((i for i, one in enumerate(known) if one.open), len(known))
            assert self.committed(TOPIC, q) <= first_open
            queue = self.state.pop.get(GROUP, TOPIC, q)
            if queue is not None:
                kept = [one for one in known if one.open and one.visible_ms]
                assert queue.in_flight(self.now_ms) >= sum(one.visible_ms > self.now_ms for one in kept)
                due = next_due_ms(self.state.pop, GROUP, [(TOPIC, q)], self.now_ms)
                times = [one.visible_ms for one in kept if one.visible_ms > self.now_ms]
                assert not times or (due is not None and due <= min(times))


TestPopModel = PopModel.TestCase
TestPopModel.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
