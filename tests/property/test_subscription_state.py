"""Tests of SubscriptionState, compared with a simple model of stores, a group, brokers and a program.

The model has a log per queue, a group that grants and revokes queues, the brokers' real rules for commits, and an
administrator who resets offsets. The program polls, seeks, pauses and commits, or acknowledges each message, in any
order. Answers arrive late.

The laws: A poll returns exactly the next messages of a queue, in order. A paused or revoked queue returns nothing. No
offset is committed before the program has finished with its message, or beyond the consumer's position. Committed
offsets move back only after a seek or a reset. In the end every message was returned, unless a seek or a reset skipped
it.
"""

from __future__ import annotations

import random

import pytest

from actors.core.broker.offsets import OffsetTable, Owners, judge_commits
from raymq.client.consumer.assignment.assigned_queue import AssignmentState
from raymq.client.consumer.pull.fetched_records import PolledRecords
from raymq.client.consumer.pull.settings import PullSettings
from raymq.client.consumer.pull.subscription_state import SubscriptionState
from raymq.client.consumer.subscription import Subscription
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import CommitAnswer, OffsetCommit, QueueOffset
from raymq.common.protocol.membership import GroupAssignment
from tests.support.clients.records import fetched_of, offsets_of

NAMES = [MessageQueue("orders", "a", number) for number in range(3)]
LENGTH = 60
GROUP = "billing"


class Model:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.auto = self.chance.random() < 0.5
        self.each = self.auto and self.chance.random() < 0.5
        settings = PullSettings(
            GROUP,
            auto_commit=self.auto,
            acknowledge_each=self.each,
            threshold_count=self.chance.choice([1, 3, 1000]),
            threshold_all_count=self.chance.choice([2, 1000]),
            span_max=self.chance.choice([1, 5, 2000]),
        )
        self.core = SubscriptionState(settings, 0.0)
        self.leveled = self.chance.random() < 0.3
        self.core.subscribe(Subscription.parse("orders"), has_levels=self.leveled)
        self.now_s = 0.0
        self.trouble = True
        self.generation = 1
        self.granted: set[MessageQueue] = set()
        self.end = dict.fromkeys(NAMES, 0)
        # For each queue: the offsets of the messages that pass the consumer's tag filter.
        self.wanted = {queue: {n for n in range(LENGTH) if self.chance.random() < 0.8} for queue in NAMES}
        self.table, self.owners = OffsetTable(), Owners()
        # for each held queue: the next offset that a poll must return
        self.place: dict[MessageQueue, int] = {}
        # for each queue: the offset up to which the program has finished messages
        self.finished: dict[MessageQueue, int] = {}
        self.out: dict[MessageQueue, int] = {}  # for each queue: the offset after the last message that a poll returned
        self.unacknowledged: dict[MessageQueue, set[int]] = {queue: set() for queue in NAMES}
        # For each queue: the version of the last offset reset that the program has received.
        self.version: dict[MessageQueue, int] = {}
        self.allowed: set[MessageQueue] = set()  # queues whose committed offset may move back because of a seek
        self.reads: list[tuple[MessageQueue, int, int]] = []
        self.commits: list[tuple[dict[MessageQueue, OffsetCommit], CommitAnswer]] = []

    # Steps of the simulated consumer group

    def heartbeat(self) -> None:
        self.core.assignment_received(GroupAssignment(self.generation, frozenset(self.granted), 1), self.now_s)

    def grant(self) -> None:
        self.granted.add(self.chance.choice(NAMES))
        self.generation += 1
        self.heartbeat()

    def revoke(self) -> None:
        self.granted.discard(self.chance.choice(NAMES))
        self.generation += 1
        self.heartbeat()

    def start(self) -> None:
        for assigned in self.core.starting():
            queue, generation = assigned.queue, assigned.generation
            known = self.table.get(GROUP, "orders", queue.queue_id) or QueueOffset(0)
            self.table.set(GROUP, "orders", {queue.queue_id: known.queue_offset}, {})
            self.owners.note(GROUP, "orders", queue.queue_id, generation)
            self.core.started(assigned, known)
            assert queue in self.core.assigned_queues
            self.begin(queue, known)

    def begin(self, queue: MessageQueue, start: QueueOffset) -> None:
        self.place[queue] = self.finished[queue] = start.queue_offset
        self.version[queue] = start.reset_version
        self.forget(queue)
        self.allowed.discard(queue)

    def forget(self, queue: MessageQueue) -> None:
        """Remove from the model the messages of a queue that the program has not finished."""
        self.out.pop(queue, None)
        self.unacknowledged[queue].clear()

    def release(self) -> None:
        held = self.held()
        for queue in self.core.release(self.now_s):
            assert queue not in self.granted, f"{queue} is let go while it is granted"
            if queue not in held:
                # The consumer released the queue before it received the queue's start offset, so the program has read
                # nothing from the queue.
                continue
            assert queue not in self.out, f"{queue} is let go while the program is at it"
            if self.auto:
                known = self.table.get(GROUP, "orders", queue.queue_id)
                assert known is not None
                unheard = known.reset_version > self.version[queue]
                assert unheard or known.queue_offset >= self.finished[queue], f"{queue} is let go before its commit"

    def fall_silent(self) -> None:
        self.now_s += 100.0
        self.core.fence(self.now_s)
        assert not self.core.assigned_queues
        self.heartbeat()

    # Steps of the simulated stores

    def write(self) -> None:
        for queue in NAMES:
            self.end[queue] = min(LENGTH, self.end[queue] + self.chance.randint(0, 5))

    def ask(self) -> None:
        wanted = self.core.wanted()
        assert not set(wanted) & set(self.core.paused)
        # A seek, a pause or a revocation may happen after the consumer chose the queues to fetch from and before it
        # sends the fetch requests.
        if self.trouble and self.chance.random() < 0.1:
            self.chance.choice([self.seek, self.pause, self.revoke])()
        requests = {queue: self.core.request(queue, offset) for queue, offset in wanted.items()}
        self.reads += [(queue, request.queue_offset, request.max_messages) for queue, request in requests.items()]

    def answer(self) -> None:
        self.chance.shuffle(self.reads)
        for queue, offset, room in self.reads[:4]:
            upto = min(self.end[queue], offset + room)
            found = sorted(self.wanted[queue] & set(range(offset, upto)))
            self.core.fetched(queue, offset, fetched_of(found, max(upto, offset)))
        del self.reads[:4]

    # Methods for the steps of the simulated stores on the consumer's node

    def change_way(self) -> None:
        queue = self.chance.choice(NAMES)
        self.chance.choice([self.core.read_in_place, self.core.read_by_fetches])(queue)

    def look(self) -> None:
        """Answer the consumer's request to watch queue ends: report the end offset of each queue whose files the
        consumer maps. Between the request and the answer, the consumer's position in a queue, or the queue's state, may
        change."""
        waits = self.core.waits()
        if self.trouble and self.chance.random() < 0.1:
            self.chance.choice([self.seek, self.pause, self.revoke, self.change_way])()
        for queue, request in waits:
            if not self.core.end_known(queue, request.queue_offset, 0, self.end[queue]):
                self.core.read_by_fetches(queue)

    def read(self) -> None:
        """Read a queue's memory-mapped files, in one or two parts. The consumer's position may move during the
        read."""
        most = self.chance.choice([1, 3, 500])
        turn = self.core.next_unread(most)
        if turn is None:
            unread = [self.core.get(queue).buffered_count for queue in self.core._unread]
            assert not unread or (self.leveled and min(unread) >= most)
            return
        queue, request, end = turn
        assert request.queue_offset < end <= self.end[queue]
        if self.trouble and self.chance.random() < 0.1:
            self.chance.choice([self.seek, self.pause, self.revoke, self.change_way])()
        upto = min(end, request.queue_offset + request.max_messages)
        middle = self.chance.randint(request.queue_offset + 1, upto)
        parts = [(request.queue_offset, middle), (middle, upto)] if middle < upto else [(request.queue_offset, upto)]
        found = [fetched_of(sorted(self.wanted[queue] & set(range(low, high))), high) for low, high in parts]
        self.core.fetched(queue, request.queue_offset, *found)

    def check_tables(self) -> None:
        """Check the tables that SubscriptionState updates incrementally: each equals a table that is computed anew from
        the states of all queues."""
        core, queues = self.core, self.core._queues
        assert set(core._buffered) == {queue for queue, one in queues.items() if one.buffered}
        assert set(core._unread) == {queue for queue, one in queues.items() if one.unread}
        assert set(core._unsettled) == {queue for queue, one in queues.items() if not one.settled}
        assert set(core._unfinished) == {queue for queue, one in queues.items() if one.done != one.position}
        assert core._starting.keys() == {
            queue for queue, one in queues.items() if one.state is AssignmentState.STARTING
        }
        assert set(core._dirty) == {queue for queue, one in queues.items() if one.dirty}
        assert core._revoked.keys() == {queue for queue, one in queues.items() if one.revoked}
        assert core._hungry == {queue: one.fetch_offset for queue, one in queues.items() if core._is_hungry(one)}
        mapped = {queue: one for queue, one in queues.items() if one.mapped and not one.silent}
        assert {queue: request.queue_offset for queue, request in core.waits()} == {
            queue: max(one.fetch_offset, one.known_end) for queue, one in mapped.items()
        }
        assert core._buffered_count == sum(fetched.count for one in queues.values() for fetched in one.buffered)
        assert core._buffered_bytes == sum(one.buffered_bytes for one in queues.values())

    # Steps of the simulated program

    def poll(self) -> None:
        self.core.poll_begins(self.now_s)
        if not self.each:
            self.out.clear()
        if self.auto and not self.each:
            for queue in self.held():
                self.finished[queue] = self.place[queue]
        slices = self.core.peek(self.chance.choice([1, 3, 500]))
        if self.chance.random() < 0.2:  # a seek, a pause or a revocation may happen while the poll decodes its messages
            self.chance.choice([self.seek, self.pause, self.reset, self.revoke, self.fall_silent])()
        for part in slices:
            if self.core.is_current(part):
                self.take(part)
        self.core.poll_ends(self.now_s)

    def take(self, part: PolledRecords) -> None:
        offsets = offsets_of(part)
        self.returned(part.queue, offsets)
        self.core.taken(part, offsets)
        if self.each:
            self.unacknowledged[part.queue].update(offsets)
            self.follow(part.queue)

    def follow(self, queue: MessageQueue) -> None:
        """Set the offset up to which the program has finished a queue's messages: the offset of its first
        unacknowledged message."""
        left = self.unacknowledged[queue]
        self.finished[queue] = min(left, default=self.place[queue])
        if not left:
            self.out.pop(queue, None)

    def acknowledge(self) -> None:
        """Acknowledge some random messages of each queue, even if the consumer no longer owns the queue."""
        for queue, left in self.unacknowledged.items():
            some = set(self.chance.sample(sorted(left), self.chance.randint(0, len(left))))
            self.core.acknowledge({queue: some})
            if some:
                left.difference_update(some)
                self.follow(queue)

    def returned(self, queue: MessageQueue, offsets: list[int]) -> None:
        assert queue in self.core.assigned_queues, f"{queue} is not held"
        assert queue not in self.core.paused, f"{queue} is paused"
        expected = sorted(n for n in self.wanted[queue] if n >= self.place[queue])[: len(offsets)]
        assert offsets == expected, f"{queue} at {self.place[queue]}"
        self.place[queue] = self.out[queue] = offsets[-1] + 1

    def held(self) -> frozenset[MessageQueue]:
        """Return the queues whose start offset the consumer has received."""
        return frozenset(queue for queue, assigned in self.core._queues.items() if assigned.started)

    def any_held(self) -> MessageQueue | None:
        return self.chance.choice(self.core.assigned_queues) if self.core.assigned_queues else None

    def seek(self) -> None:
        if queue := self.any_held():
            offset = self.chance.randint(0, self.end[queue])
            self.core.seek(queue, offset)
            self.place[queue] = self.finished[queue] = offset
            self.forget(queue)
            self.allowed.add(queue)

    def pause(self) -> None:
        if queue := self.any_held():
            self.core.pause([queue])

    def resume(self) -> None:
        self.core.resume(self.core.paused)

    def commit_all(self) -> None:
        self.core.finish_all()
        if not self.each:
            self.out.clear()
            for queue in self.held():
                self.finished[queue] = self.place[queue]
        self.commit()
        self.take_answers()

    def commit_one(self) -> None:
        if not self.each and (queue := self.any_held()):
            offset = self.chance.randint(0, self.core.get(queue).position)
            self.core.finish({queue: offset})
            self.finished[queue] = max(self.finished[queue], offset)

    # Steps of the simulated brokers

    def commit(self) -> None:
        """Send a commit of the consumer to the broker, unless another commit is in flight."""
        if not self.commits:
            commits = self.core.uncommitted()
            self.commits.append((commits, self.broker(commits)))

    def question(self) -> None:
        reset_queries = self.core.reset_queries()
        self.core.commit_answered(reset_queries, self.noted(self.broker(reset_queries)))

    def broker(self, commits: dict[MessageQueue, OffsetCommit]) -> CommitAnswer:
        for queue, commit in commits.items():
            if commit.queue_offset is not None:
                assert commit.queue_offset <= self.core._queues[queue].position, f"{queue} is committed ahead"
                assert not commit.backwards or queue in self.allowed, f"{queue} goes back unasked"
                left_out = {n for n in self.wanted[queue] if self.finished[queue] <= n < commit.queue_offset}
                assert not left_out, f"{queue}: {commit.queue_offset} is committed over {left_out}"
        by_id = {queue.queue_id: commit for queue, commit in commits.items()}
        verdict = judge_commits(self.table, self.owners, GROUP, "orders", by_id)
        self.table.set(GROUP, "orders", verdict.offsets, {})
        assert not verdict.fenced, "there is no other member"
        return CommitAnswer({MessageQueue("orders", "a", number): at for number, at in verdict.reset.items()})

    def take_answers(self) -> None:
        for commits, answer in self.commits:
            self.core.commit_answered(commits, self.noted(answer))
        self.commits.clear()

    def noted(self, answer: CommitAnswer) -> CommitAnswer:
        """Apply the offset resets in a broker's answer to the test's expected offsets. Returns the answer."""
        for queue, at in answer.reset.items():
            assigned = self.core._queues.get(queue)
            if assigned is not None and at.reset_version > assigned.reset_version:
                self.place[queue] = self.finished[queue] = at.queue_offset
                if self.each:
                    self.forget(queue)
                self.version[queue] = at.reset_version
        return answer

    def reset(self) -> None:
        queue = self.chance.choice(NAMES)
        version = self.table.version(GROUP, "orders", queue.queue_id) + 1
        offset = self.chance.randint(0, self.end[queue])
        self.table.set(GROUP, "orders", {queue.queue_id: offset}, {queue.queue_id: version})

    def step(self) -> None:
        usual = [self.write, self.ask, self.answer, self.poll, self.start, self.commit, self.take_answers, self.release]
        usual += [self.look, self.read]
        if self.each:
            usual += [self.acknowledge]
        unusual = [
            self.change_way,
            self.grant,
            self.heartbeat,
            self.seek,
            self.pause,
            self.resume,
            self.commit_one,
            self.question,
        ]
        rare = [self.revoke, self.reset, self.fall_silent, self.commit_all]
        self.chance.choice(usual * 6 + unusual * 2 + rare)()
        self.now_s += 0.1
        for queue in self.core.assigned_queues:
            assigned = self.core.get(queue)
            assert assigned.done <= assigned.position
        self.check_tables()

    def settle(self) -> None:
        """End all pauses, revocations and resets, and check that the consumer polls and commits all remaining
        messages."""
        self.trouble = False
        self.granted = set(NAMES)
        self.generation += 1
        self.heartbeat()
        self.resume()
        self.take_answers()
        self.question()
        for _ in range(LENGTH * 12):
            self.start()
            if all(self.core.get(queue).position >= self.end[queue] for queue in NAMES):
                break
            self.ask()
            self.answer()
            self.look()
            self.read()
            self.core.poll_begins(self.now_s)
            for part in self.core.peek(500):
                self.take(part)
            self.core.poll_ends(self.now_s)
            self.question()
        while any(self.unacknowledged.values()):
            self.acknowledge()
        self.commit_all()
        for queue in NAMES:
            behind = {n for n in self.wanted[queue] if self.place[queue] <= n < self.end[queue]}
            assert not behind, f"{queue}: {behind} were never returned"
            assert self.table.get(GROUP, "orders", queue.queue_id).queue_offset == self.core.get(queue).position


@pytest.mark.parametrize("block", range(10))
def test_polls_return_the_next_messages_and_only_finished_messages_are_committed(block):
    for seed in range(block * 100, (block + 1) * 100):
        try:
            model = Model(seed)
            for _ in range(200):
                model.step()
            model.settle()
        except AssertionError:
            print("seed", seed)
            raise
