"""Tests of process queues, compared with a simple model of a store, a listener and a broker.

The store has a log per queue. The listener works, fails, is slow, is removed or dies. The broker keeps committed
offsets and accepts messages that the consumer sends back. Queues are granted, revoked and reset, and retention deletes
messages.

The laws: The committed offset never passes a message that was neither consumed, nor sent back, nor deleted. In order
mode, no message of a queue is delivered before an earlier one, and only one task runs at a time. A fetched message is
finished or still held by the consumer. In the end every message is consumed or sent back. In order mode, a crash
repeats at most one full task.
"""

from __future__ import annotations

import random

import pytest

from actors.core.consume.consume_service import SendBack
from actors.core.consume.process_queue import ConsumeTask, ProcessQueue
from actors.core.consume.process_queues import ProcessQueues
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.subscription import Subscription
from raymq.common.message import MessageQueue
from raymq.common.protocol.consume_result import ConsumeReport, Failure
from raymq.common.protocol.group import CommitAnswer, OffsetCommit, QueueOffset
from raymq.common.protocol.membership import GroupAssignment
from tests.support.clients.records import records_of

NAMES = [MessageQueue("orders", "broker-a", number) for number in range(3)]
LENGTH = 40
SEEDS_PER_BLOCK = 60


class Model:
    def __init__(self, seed: int, *, orderly: bool) -> None:
        self.chance = chance = random.Random(seed)
        self.orderly = orderly
        self.settings = PushSettings(
            "billing",
            (Subscription.parse("orders"),),
            orderly=orderly,
            threads=chance.choice([1, 3, 20]),
            pull_batch_size=chance.choice([1, 4, 512]),
            pull_threshold_for_queue=chance.choice([1, 5, 1000]),
            consume_concurrently_max_span=chance.choice([1, 7, 2000]),
            max_reconsume_times=chance.choice([-1, 0, 2]),
        )
        self.core = ProcessQueues(self.settings)
        self.now_s = 0.0
        self.first = dict.fromkeys(NAMES, 0)  # the first offset of each queue that retention has not deleted
        # For each queue: the offset at which the consumer continued after it found that earlier messages were deleted.
        self.gone = dict.fromkeys(NAMES, 0)
        self.end = dict.fromkeys(NAMES, 0)
        # for each queue: the offsets whose messages pass the consumer's tag filter
        self.wanted = {queue: {n for n in range(LENGTH) if chance.random() < 0.7} for queue in NAMES}
        self.stored = dict.fromkeys(NAMES, QueueOffset(0))
        self.done: dict[MessageQueue, set[int]] = {queue: set() for queue in NAMES}
        # in order mode, for each process queue: the offset up to which messages are finished
        self.place: dict[ProcessQueue, int] = {}
        self.flying: list[ConsumeTask] = []
        self.sending: list[SendBack] = []
        self.answers: list[tuple[MessageQueue, int, tuple[int, ...], int]] = []
        self.asked: tuple[dict[MessageQueue, OffsetCommit], CommitAnswer] | None = None
        self.generation = 1
        self.back()

    # Steps of the simulated store

    def write(self) -> None:
        for queue in NAMES:
            self.end[queue] = min(LENGTH, self.end[queue] + self.chance.randint(0, 5))

    def expire(self) -> None:
        queue = self.chance.choice(NAMES)
        self.first[queue] = self.chance.randint(self.first[queue], self.end[queue])

    def fetch(self) -> None:
        for queue, offset in self.core.wanted(self.now_s).items():
            if offset < self.first[queue]:
                self.gone[queue] = max(self.gone[queue], self.first[queue])
                self.core.jump(queue, offset, self.first[queue])
            elif offset < self.end[queue]:
                upto = min(self.end[queue], offset + self.chance.randint(1, 6))
                found = tuple(sorted(self.wanted[queue] & set(range(offset, upto))))
                self.answers.append((queue, offset, found, upto))
                self.core.fetched(queue, offset, records_of(found), upto, self.now_s)

    def fetched_late(self) -> None:
        if self.answers:
            queue, offset, found, upto = self.chance.choice(self.answers[-6:])
            self.core.fetched(queue, offset, records_of(found), upto, self.now_s)

    # Methods for the listener's steps in the simulation

    def deliver(self) -> None:
        for task in self.core.deliverable(self.now_s):
            assert not task.process_queue.dropped
            assert task.unfinished == set(range(len(task.messages)))
            if self.orderly:
                self.check_order(task)
            self.flying.append(task)

    def check_order(self, task: ConsumeTask) -> None:
        others = [other for other in self.flying if other.queue == task.queue]
        assert not others, f"two tasks of {task.queue} in flight"
        first, place = task.messages.offsets[0], self.place.get(task.process_queue, 0)
        skipped = {n for n in self.wanted[task.queue] if place <= n < first and n >= self.gone[task.queue]} - self.done[
            task.queue
        ]
        assert not skipped, f"{task.queue} skips {skipped}"
        assert first >= place, f"{task.queue} goes back"
        process_queue = task.process_queue
        repeated = process_queue.finished_count + len(task.messages)
        assert repeated <= max(self.settings.pull_batch_size, len(task.messages)), "too much would be repeated"

    def progress(self) -> None:
        if not self.flying:
            return
        task = self.chance.choice(self.flying)
        left = sorted(task.unfinished - task.sending)
        if self.orderly:
            self.report_in_order(task, left)
            return
        ended = {index for index in left if self.chance.random() < 0.6}
        failed = {index for index in ended if self.chance.random() < 0.3}
        unfinished = tuple(index for index in left if index not in ended)
        over = not unfinished or self.chance.random() < 0.1
        failures = tuple(Failure(index, 1, "x", delay_level=self.chance.choice([-1, 0, 3])) for index in failed)
        self.report(task, ConsumeReport(unfinished, failures, over), ended - failed)

    def report_in_order(self, task: ConsumeTask, left: list[int]) -> None:
        count = self.chance.randint(0, len(left))
        ended, rest = left[:count], left[count:]
        failures = ()
        if ended and self.chance.random() < 0.3:
            failures = (Failure(ended[-1], 1, "x"),)
        over = not rest or bool(failures) or self.chance.random() < 0.1
        well = set(ended[:-1] if failures else ended)
        self.report(task, ConsumeReport(tuple(rest), failures, over), well)

    def report(self, task: ConsumeTask, report: ConsumeReport, well: set[int]) -> None:
        offsets = {task.messages.offsets[index] for index in well}
        self.done[task.queue] |= offsets
        if offsets and not task.process_queue.dropped:
            self.place[task.process_queue] = max(offsets) + 1
        if report.ended:
            self.flying.remove(task)
        self.sending += self.core.reported(task, report, self.now_s).send_backs

    def die(self) -> None:
        flying, self.flying = self.flying, []
        self.core.listener_lost()
        for task in flying:
            self.sending += self.core.died(task, self.now_s).send_backs

    def back(self) -> None:
        self.core.listener_back()

    # Steps of the simulated broker

    def answer_send_back(self) -> None:
        if not self.sending:
            return
        sent = self.sending.pop(self.chance.randrange(len(self.sending)))
        if self.chance.random() < 0.3:
            self.core.send_back_failed(sent, self.now_s)
            return
        self.done[sent.task.queue].update(sent.messages.offsets)
        if not sent.task.process_queue.dropped:
            self.place[sent.task.process_queue] = max(sent.messages.offsets) + 1
        self.core.sent_back(sent)

    def ask_commit(self) -> None:
        if self.asked is not None:
            return
        commits = self.core.reset_queries() if self.chance.random() < 0.2 else {}
        commits |= self.core.uncommitted("broker-a")
        reset = {}
        for queue, commit in commits.items():
            at = self.stored[queue]
            if commit.reset_version != at.reset_version:
                reset[queue] = at
            elif commit.queue_offset is not None:
                unseen = {n for n in self.wanted[queue] if self.gone[queue] <= n < commit.queue_offset}
                assert not unseen - self.done[queue], f"{queue}: {commit.queue_offset} passes {unseen}"
                if self.chance.random() < 0.8:
                    self.stored[queue] = QueueOffset(max(at.queue_offset, commit.queue_offset), at.reset_version)
        self.asked = (commits, CommitAnswer(reset))

    def answer_commit(self) -> None:
        if self.asked is not None:
            commits, answer = self.asked
            self.asked = None
            kept = {
                queue: commit
                for queue, commit in commits.items()
                if queue in answer.reset
                or commit.queue_offset is None
                or self.stored[queue].queue_offset >= commit.queue_offset
            }
            self.core.commit_answered(kept, answer)

    def reset(self) -> None:
        queue = self.chance.choice(NAMES)
        at = self.stored[queue]
        self.stored[queue] = QueueOffset(self.chance.randint(0, self.end[queue]), at.reset_version + 1)
        # After an offset reset, the messages before the new offset count as consumed. Messages at and after the new
        # offset must be consumed again.
        self.done[queue] = set(range(self.stored[queue].queue_offset))

    # Steps of the simulated consumer group: queues are granted and revoked

    def grant(self) -> None:
        queue = self.chance.choice(NAMES)
        if queue not in self.core.holding:
            self.generation += 1
            self.assign(self.core.holding | {queue})

    def assign(self, queues: frozenset[MessageQueue]) -> None:
        self.core.assignment_received(GroupAssignment(self.generation, queues, 1), self.now_s)

    def begin(self) -> None:
        for process_queue in self.core.starting("broker-a"):
            self.core.started(process_queue, self.stored[process_queue.queue])
            self.place[process_queue] = self.stored[process_queue.queue].queue_offset

    def revoke(self) -> None:
        if self.core.holding:
            self.core.revoke([self.chance.choice(sorted(self.core.holding))], self.now_s)

    def release(self) -> None:
        for queue in self.core.release(self.now_s):
            if self.orderly:
                assert all(task.queue != queue for task in self.flying), f"{queue} is released with a task in flight"

    def fence(self) -> None:
        self.core.lose_all()

    def suspend(self) -> None:
        self.core.suspend(True)
        self.fetch()
        assert self.core.deliverable(self.now_s) == []
        self.core.suspend(False)

    def pass_time(self) -> None:
        self.now_s += self.chance.choice([0.1, 1.0, 40.0])

    def check_account(self) -> None:
        for process_queue in self.core.process_queues():
            waiting = sum(len(run) for run in process_queue.waiting)
            under_way = sum(
                len(task.unfinished) for task in {*process_queue.flying, *process_queue.again, *process_queue.sending}
            )
            assert waiting == process_queue.waiting_count
            if not process_queue.revoked:
                assert waiting + under_way == process_queue.count, (
                    f"{process_queue.queue}: {waiting} + {under_way} of {process_queue.count}"
                )
            assert process_queue.count or process_queue.size_bytes == 0 or process_queue.revoked

    def step(self) -> None:
        usual = [
            self.fetch,
            self.deliver,
            self.progress,
            self.answer_send_back,
            self.ask_commit,
            self.answer_commit,
            self.release,
            self.grant,
            self.begin,
            self.back,
            self.write,
            self.pass_time,
        ]
        unusual = [self.fetched_late, self.revoke, self.fence, self.expire, self.die, self.reset, self.suspend]
        self.chance.choice(usual * 5 + unusual)()
        self.check_account()

    def settle(self) -> None:
        """Consume and commit all remaining messages, without further failures and revocations."""
        self.core.revoke(self.core.holding, self.now_s)
        for _ in range(LENGTH * 60):
            self.now_s += 60.0
            self.assign(frozenset(NAMES))
            self.back()
            self.begin()
            self.fetch()
            self.deliver()
            for task in list(self.flying):
                left = task.unfinished - task.sending
                self.report(task, ConsumeReport(), set(left))
            self.answer_send_back()
            self.ask_commit()
            self.answer_commit()
            self.release()
            self.check_account()
            if all(self.stored[queue].queue_offset >= self.end[queue] for queue in NAMES):
                break
        for queue in NAMES:
            left = {n for n in self.wanted[queue] if self.gone[queue] <= n < self.end[queue]} - self.done[queue]
            assert not left, f"{queue}: {left} were never consumed"
            assert self.stored[queue].queue_offset >= self.end[queue], f"{queue} is not committed to its end"


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("block", range(10))
def test_nothing_is_lost_and_only_consumed_messages_are_committed(block, orderly):
    for seed in range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK):
        try:
            model = Model(seed, orderly=orderly)
            for _ in range(150):
                model.step()
            model.settle()
        except AssertionError:
            print("seed", seed)
            raise
