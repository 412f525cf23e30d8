"""Processes of a simulated cluster on one virtual clock: brokers, Rebalance actors, group members, and the register in
Ray's GCS, which records the Rebalance actor that holds the group.

Each process runs the product's decision code (BrokerState, RebalanceServer, ProcessQueues), and calls its functions in
the order of the real process. The processes call each other over a network (`World.call`). The network may lose a call,
delay it, or deliver it twice. If a process is killed, messages in transit to the process are lost. A paused process
receives all messages late. Each process has a wall clock, which a simulated fault may set. It also has its own
monotonic clock, which runs faster or slower than true time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from actors.core.broker.offsets import Owners
from actors.core.broker.state import BrokerState, Change
from actors.core.consume.process_queue import ProcessQueue
from actors.core.rebalance.group import RebalanceGroup
from actors.core.rebalance.server import RebalanceServer, TopicQueues
from actors.core.rebalance.slot_lease import LOOK_INTERVAL_S, Drop, Get, Look, Put, SlotLease
from raymq.client.consumer.rebalance_client import HeartbeatElision, ServerChoice
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import CommitAnswer, OffsetCommit, QueueOffset
from raymq.common.protocol.membership import (
    Allocation,
    GroupAssignment,
    GroupHeartbeat,
    Heartbeat,
    HeartbeatAnswer,
    OtherServer,
    SteadyAnswer,
    SteadyHeartbeat,
    slot_of,
)
from tests.support.group_sim.invariants import Tenure
from tests.support.group_sim.queues import Delivery, MemberQueues

if TYPE_CHECKING:
    from tests.support.group_sim.world import World

T = TypeVar("T")

GROUP = "billing"
SESSION_S = 6.0
LEASE_S = SESSION_S * 0.6
HEARTBEAT_S = 1.0
SERVERS = 2
VALID_S = 2.5
CALL_TIMEOUT_S = 1.5
POLL_S = 0.4


class Process:
    """One process of the simulated cluster.

    `life` counts the incarnations of the process. A message that was sent to one incarnation does not reach a later
    incarnation.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.life = 0
        self.up = True
        self.frozen_until_s = 0.0
        self.cut_off_until_s = 0.0
        self.rate = world.chance.uniform(0.88, 1.12)
        self.ahead_s = world.chance.uniform(0.0, 1000.0)
        self.wall_error_s = 0.0

    def now_s(self) -> float:
        return self.world.now_s * self.rate + self.ahead_s

    def wall_ns(self) -> int:
        return int((1_000_000 + self.world.now_s + self.wall_error_s) * 1e9)

    def kill(self) -> None:
        self.life += 1
        self.up = False
        self.frozen_until_s = 0.0


class Broker(Process):
    """A simulated broker of one broker group. After a restart the broker rebuilds its state from its records. The
    records do not contain the owners of queues."""

    def __init__(self, world: World, name: str, topics: dict[str, int]) -> None:
        super().__init__(world, name)
        self.records: list[Change] = [
            {"kind": "topic", "topic": topic, "read_queue_nums": count, "write_queue_nums": count, "perm": 6}
            for topic, count in topics.items()
        ]
        self.records.append({"kind": "group", "group": GROUP})
        self.start_again()

    def start_again(self) -> None:
        self.up = True
        self.state, self.owners = BrokerState(), Owners()
        for record in self.records:
            self.state.apply(record, 0)

    def _store(self, *changes: Change | None) -> None:
        for change in changes:
            if change is not None:
                self.records.append(change)
                self.state.apply(change, 0)

    def start_offset(self, queue: MessageQueue, generation: int) -> QueueOffset:
        self._store(self.state.decide_starts(GROUP, queue.topic, {queue.queue_id: 0}))
        self.owners.note(GROUP, queue.topic, queue.queue_id, generation)
        return self._committed(queue)

    def commit_offsets(self, commits: dict[MessageQueue, OffsetCommit]) -> CommitAnswer:
        reset: dict[MessageQueue, QueueOffset] = {}
        fenced: set[MessageQueue] = set()
        for queue, commit in commits.items():
            table = {queue.topic: {queue.queue_id: commit}}
            changes, verdicts, _ = self.state.decide_commits(self.owners, GROUP, table)
            self._store(*changes)
            verdict = verdicts[queue.topic]
            if verdict.fenced:
                fenced.add(queue)
            if verdict.reset:
                reset[queue] = verdict.reset[queue.queue_id]
            self._tell(queue)
        return CommitAnswer(reset, frozenset(fenced))

    def reset(self, queue: MessageQueue, offset: int) -> None:
        self._store(self.state.decide_reset(GROUP, queue.topic, {queue.queue_id: offset}))
        self.world.ledger.reset(queue, offset)
        self._tell(queue)

    def _tell(self, queue: MessageQueue) -> None:
        if self.state.offsets.get(GROUP, queue.topic, queue.queue_id) is not None:
            self.world.ledger.committed(queue, self._committed(queue).queue_offset)

    def _committed(self, queue: MessageQueue) -> QueueOffset:
        known = self.state.offsets.get(GROUP, queue.topic, queue.queue_id)
        assert known is not None
        return known


def carry_out(values: dict[str, str], call: Get | Put | Drop) -> Any:
    """Apply a call to `values` as the key-value store of Ray's GCS does, and return the call's result."""
    if isinstance(call, Get):
        return values.get(call.key)
    if isinstance(call, Drop):
        return values.pop(call.key, None)
    if not call.overwrite and call.key in values:
        return False
    values[call.key] = call.value
    return True


class Register(Process):
    """A stand-in for the key-value store of Ray's GCS. It never fails and never loses a value."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "register")
        self.values: dict[str, str] = {}

    def carry_out(self, call: Get | Put | Drop) -> object:
        return carry_out(self.values, call)


class Rebalance(Process):
    """A simulated Rebalance actor. Like the real actor's thread, it reads the register between its heartbeats. The
    register records which Rebalance actor holds the group."""

    group_class = RebalanceGroup
    lease_class = SlotLease

    def __init__(self, world: World, index: int) -> None:
        super().__init__(world, f"rebalance-{index}")
        self.index = index
        self.start_again()

    def start_again(self) -> None:
        self.up = True
        life = f"{self.name}:{self.life}"
        slot = slot_of(GROUP)
        self.server = RebalanceServer(
            self.index, SERVERS, life, session_timeout_s=SESSION_S, valid_s=VALID_S, slots=[slot]
        )
        self.server.core_class = self.group_class
        self.lease = self.server.leases[slot]
        self.lease.__class__ = self.lease_class
        for topic in {queue.topic for queue in self.world.queues}:
            queues = [queue for queue in self.world.queues if queue.topic == topic]
            self.server.set_queues(topic, TopicQueues(tuple(queues)))
        self.look()

    def look(self) -> None:
        self.server.sweep(self.now_s())
        self.step(self.lease.look(self.now_s, self.wall_ns), None)

    def step(self, look: Look, answer: object) -> None:
        held = self.lease.held
        try:
            call = look.send(answer)
        except StopIteration:
            self.world.at(self, LOOK_INTERVAL_S, self.look)
            return
        finally:
            if self.lease.held and not held:
                self.world.note("holds", self.name, self.lease.epoch)
        register = self.world.register

        def failed() -> None:
            self.world.at(self, LOOK_INTERVAL_S, self.look)

        self.world.call(
            self, register, lambda: register.carry_out(call), lambda result: self.step(look, result), failed
        )

    def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        return self.server.heartbeat(GROUP, heartbeat, self.now_s())

    def offsets_reset(self) -> int | OtherServer:
        return self.server.offsets_reset(GROUP, self.now_s())


class Member(Process):
    """A simulated push-consumer instance: its heartbeats, process queues and listener. Its steps have the same order as
    in the Pull actor.

    In one turn it does these steps: heartbeat → lease, revocations → start offsets of new queues → commits → releases →
    next turn. Between turns it fetches messages and passes them to the listener: every POLL_S, and whenever the
    listener has finished a batch.
    """

    def __init__(self, world: World, name: str, topics: frozenset[str], allocation: Allocation) -> None:
        super().__init__(world, name)
        self.topics, self.allocation = topics, allocation
        self.session = self.sequence = self.generation = self.offsets_version = 0
        self.must_ask = self.stopping = False
        self.queues = MemberQueues(LEASE_S)
        self.tenures: dict[MessageQueue, Tenure] = {}
        self.lease_until_s = -1.0
        self.choice = ServerChoice(GROUP)
        self.steadiness = HeartbeatElision()

    def start(self) -> None:
        self.turn()
        self.poll()

    def stop(self) -> None:
        """Let the simulated member begin to stop. From its next commit on it accepts no new queues. It leaves the group
        after it has finished and committed its batches in flight."""
        self.stopping = True

    def kill(self) -> None:
        super().kill()
        self.world.ledger.forget_member(self)

    def leased(self) -> bool:
        return self.up and self.now_s() <= self.lease_until_s

    def may_deliver(self, queue: MessageQueue) -> bool:
        return self.leased() and self.queues.may_deliver(queue)

    def fence_when_late(self) -> None:
        holding = self.queues.holding
        if self.queues.fence(self.now_s()):
            for queue in holding:
                self.world.ledger.fenced(self, queue)

    # Methods that deliver messages to the listener

    def poll(self) -> None:
        self.deliver()
        self.world.at(self, POLL_S, self.poll)

    def deliver(self) -> None:
        self.fence_when_late()
        self.queues.fetch(self.world.ledger.end, self.now_s())
        for delivery in self.queues.deliveries(self.now_s()):
            tenure = self.tenures[delivery.queue]
            self.world.note("delivers", self.name, delivery.queue, delivery.first)
            self.world.ledger.deliver(tenure, delivery.first, delivery.end, self.world.members.values())
            self.world.later(self.world.listener_pause_s(), self.guard(partial(self.listened, delivery, tenure)))

    def listened(self, delivery: Delivery, tenure: Tenure) -> None:
        """Finish a batch in the listener, which is a separate process. A paused member receives the result only after
        the pause."""
        consumed = not self.world.listener_fails()
        self.world.ledger.finish(tenure, consumed=consumed)
        self.world.at(self, 0.0, lambda: self.heard(delivery, consumed=consumed))

    def heard(self, delivery: Delivery, *, consumed: bool) -> None:
        self.queues.ended(delivery, self.now_s(), consumed=consumed)
        self.deliver()

    def guard(self, action: Callable[[], None]) -> Callable[[], None]:
        """Return a wrapper of `action`. The wrapper does nothing if this simulated process has died after the wrapper
        was made."""
        life = self.life
        return lambda: action() if self.life == life else None

    # Methods for this member's membership in its consumer group

    def turn(self) -> None:
        self.fence_when_late()
        self.sequence += 1
        said = GroupHeartbeat(self.name, self.topics, self.queues.holding, allocation=self.allocation)
        heartbeat: Heartbeat = replace(said, session=self.session, sequence=self.sequence, generation=self.generation)
        if self.steadiness.allows(said):
            heartbeat = SteadyHeartbeat(self.name, self.session, self.sequence, self.generation)
        sent_s = self.now_s()
        rebalance = self.rebalance()

        def failed() -> None:
            self.steadiness.forget()
            self.choice.failed(self.world.rebalance_names)
            self.commit()

        self.world.call(
            self,
            rebalance,
            lambda: rebalance.heartbeat(heartbeat),
            lambda answer: self.hear(said, answer, sent_s),
            failed,
        )

    def hear(self, said: GroupHeartbeat, answer: HeartbeatAnswer, sent_s: float) -> None:
        known = self.steadiness.assignment
        if answer is SteadyAnswer.SAME and known is not None:
            self.world.note("steady", self.name)
            self.take(known, sent_s)
        elif isinstance(answer, SteadyAnswer):
            self.steadiness.forget()
            self.turn()
        else:
            self.steadiness.forget()
            if isinstance(answer, GroupAssignment) and self.session == answer.session:
                self.steadiness.heard(said, answer)
            self.take(answer, sent_s)

    def rebalance(self) -> Rebalance:
        name = self.choice.server(self.world.rebalance_names)
        assert name is not None
        return self.world.rebalances[name]

    def take(self, assignment: HeartbeatAnswer, sent_s: float) -> None:
        """Apply the answer to a heartbeat: its lease and its assignment take effect together. Otherwise messages could
        be delivered under the new lease, but with the old assignment."""
        if isinstance(assignment, OtherServer):
            if assignment.holder:
                self.choice.redirected(assignment.holder)
            self.commit()
            return
        assert isinstance(assignment, GroupAssignment), assignment
        if assignment.session != self.session:
            self.session = assignment.session
            self.generation = max(self.generation, assignment.generation)
            self.turn()
            return
        if assignment.generation < self.generation:
            self.commit()
            return
        self.generation = assignment.generation
        self.lease_until_s = sent_s + LEASE_S
        self.queues.assignment_received(assignment, sent_s)
        if assignment.offsets_version != self.offsets_version:
            self.offsets_version, self.must_ask = assignment.offsets_version, True
        self.in_turn(self.queues.starting(), self.begin, self.commit)

    def begin(self, process_queue: ProcessQueue, done: Callable[[], None]) -> None:
        queue, generation = process_queue.queue, process_queue.generation
        broker = self.world.brokers[queue.broker_name]

        def begun(start: QueueOffset) -> None:
            if self.queues.started(process_queue, start):
                self.tenures[queue] = self.world.ledger.begin(self, queue, start.queue_offset)
            done()

        self.world.call(self, broker, lambda: broker.start_offset(queue, generation), begun, done)

    def commit(self) -> None:
        """Commit the messages that the listener has finished. If offsets were reset, also request the committed offset
        of every queue."""
        self.fence_when_late()
        if self.stopping:
            self.queues.stop(self.now_s())
        failures: list[str] = []

        def finished() -> None:
            self.must_ask = self.must_ask and bool(failures)
            self.release()

        self.in_turn(sorted(self.world.brokers), lambda name, done: self.commit_at(name, failures, done), finished)

    def commits(self, broker_name: str) -> dict[MessageQueue, OffsetCommit]:
        return self.queues.commits(broker_name, ask=self.must_ask)

    def commit_at(self, name: str, failures: list[str], done: Callable[[], None]) -> None:
        broker, commits = self.world.brokers[name], self.commits(name)
        if not commits:
            done()
            return
        tenures = {queue: self.tenures[queue] for queue in commits}

        def answered(answer: CommitAnswer) -> None:
            self.hear_of_commits(commits, answer, tenures)
            done()

        def failed() -> None:
            failures.append(name)
            done()

        self.world.call(self, broker, lambda: broker.commit_offsets(commits), answered, failed)

    def hear_of_commits(
        self, commits: dict[MessageQueue, OffsetCommit], answer: CommitAnswer, tenures: dict[MessageQueue, Tenure]
    ) -> None:
        before = {queue: self.queues.process_queue(queue) for queue in commits}
        self.queues.committed(commits, answer)
        for queue, process_queue in before.items():
            now = self.queues.process_queue(queue)
            if process_queue is None or now is process_queue or self.tenures[queue] is not tenures[queue]:
                continue
            if queue in answer.fenced:
                self.world.ledger.fenced(self, queue)
            if now is not None:
                self.tenures[queue] = self.world.ledger.begin(self, queue, answer.reset[queue].queue_offset)

    def release(self) -> None:
        self.fence_when_late()
        released = self.queues.release(self.now_s())
        if self.stopping and not self.queues.holding:
            self.leave()
        else:
            self.world.at(self, 0.0 if released else HEARTBEAT_S, self.turn)

    def leave(self) -> None:
        self.sequence += 1
        farewell = GroupHeartbeat(
            self.name, frozenset(), frozenset(), leaving=True, session=self.session, sequence=self.sequence
        )
        rebalance = self.rebalance()
        self.world.call(self, rebalance, lambda: rebalance.heartbeat(farewell), lambda _: self.end(), self.end)

    def end(self) -> None:
        self.world.members.pop(self.name, None)
        self.kill()

    def in_turn(
        self, items: Sequence[T], step: Callable[[T, Callable[[], None]], None], finished: Callable[[], None]
    ) -> None:
        """Run `step` for each item, one after another, and then call `finished`. A step gets an item and a function. It
        calls this function when it is done, so that the next step begins."""
        if not items:
            finished()
        else:
            step(items[0], lambda: self.in_turn(items[1:], step, finished))
