"""Process queues against a simple model: a store with a log per queue, a listener that works, fails or is slow, a
broker that keeps committed offsets; queues come and go, and retention takes messages away.

The laws: within a queue nothing is skipped except what the store no longer has, and batches come in order, one at a
time; the committed offset never passes a message that was neither consumed nor gone; in the end all is consumed.
"""

from __future__ import annotations

import random

import pytest

from actors.core.process_queues import Batch, ProcessQueues
from raymq.message import MessageQueue

NAMES = [MessageQueue("orders", "broker-a", number) for number in range(3)]
LENGTH = 40


class Model:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.core = ProcessQueues(
            threshold_count=self.chance.choice([1, 5, 1000]), threshold_bytes=self.chance.choice([8, 1000])
        )
        self.now_s = 0.0
        self.first = dict.fromkeys(NAMES, 0)  # what retention has left
        self.gone = dict.fromkeys(NAMES, 0)  # what the owner was told is gone
        self.end = dict.fromkeys(NAMES, 0)
        self.wanted = {queue: {n for n in range(LENGTH) if self.chance.random() < 0.7} for queue in NAMES}  # by tags
        self.committed = dict.fromkeys(NAMES, 0)
        self.done: dict[MessageQueue, set[int]] = {queue: set() for queue in NAMES}
        self.place: dict[MessageQueue, int] = {}  # where this instance stands in a queue it holds
        self.flying: list[Batch] = []
        self.orphans: list[Batch] = []  # in flight when their queue was given up
        self.answers: list[tuple[MessageQueue, int, bytes, int, int]] = []

    def fetch(self) -> None:
        for queue, offset in self.core.wanted().items():
            if offset < self.first[queue]:
                self.gone[queue] = max(self.gone[queue], self.first[queue])
                self.core.jump(queue, offset, self.first[queue])
            elif offset < self.end[queue]:
                upto = min(self.end[queue], offset + self.chance.randint(1, 6))
                found = sorted(self.wanted[queue] & set(range(offset, upto)))
                answer = (queue, offset, bytes(found), len(found), upto)
                self.answers.append(answer)
                self.core.fetched(*answer)

    def fetched_late(self) -> None:
        if self.answers:
            self.core.fetched(*self.chance.choice(self.answers[-6:]))

    def deliver(self) -> None:
        for batch in self.core.deliverable(self.now_s):
            assert all(other.queue != batch.queue for other in self.flying), f"two batches of {batch.queue} in flight"
            assert batch.count == len(batch.records) > 0
            before = self.wanted[batch.queue] & set(range(self.place[batch.queue], batch.records[0]))
            # What lies before the batch and was not consumed here must have been gone when it was asked for.
            assert all(offset < self.gone[batch.queue] for offset in before), f"{batch.queue} skips {before}"
            assert batch.records[0] >= self.place[batch.queue], f"{batch.queue} goes back"
            self.flying.append(batch)

    def finish(self) -> None:
        if not self.flying:
            return
        batch = self.flying.pop(self.chance.randrange(len(self.flying)))
        if self.chance.random() < 0.3:
            self.core.failed(batch, self.now_s)
            return
        self.done[batch.queue] |= set(batch.records)
        if not any(batch is orphan for orphan in self.orphans):
            self.place[batch.queue] = batch.records[-1] + 1
        self.core.consumed(batch)

    def commit(self) -> None:
        for queue, offset in self.core.uncommitted().items():
            unseen = {n for n in self.wanted[queue] if n < offset and n >= self.gone[queue]} - self.done[queue]
            assert not unseen, f"{queue}: {offset} is committed over {unseen}"
            if self.chance.random() < 0.8:
                self.committed[queue] = offset
                self.core.committed(queue, offset)

    def grant(self) -> None:
        queue = self.chance.choice(NAMES)
        if queue not in self.core.holding:
            self.core.add(queue, self.committed[queue])
            self.place[queue] = self.committed[queue]

    def revoke(self) -> None:
        if self.core.holding:
            self.core.revoke(self.chance.choice(sorted(self.core.holding)))

    def release(self) -> None:
        for queue in self.core.released():
            assert all(batch.queue != queue for batch in self.flying), f"{queue} is released with a batch in flight"
            self.core.drop(queue)
            del self.place[queue]

    def fence(self) -> None:
        self.orphans += self.flying
        for queue in self.core.holding:
            self.core.drop(queue)
            del self.place[queue]

    def write(self) -> None:
        for queue in NAMES:
            self.end[queue] = min(LENGTH, self.end[queue] + self.chance.randint(0, 5))

    def expire(self) -> None:
        queue = self.chance.choice(NAMES)
        self.first[queue] = self.chance.randint(self.first[queue], self.end[queue])

    def pass_time(self) -> None:
        self.now_s += self.chance.choice([0.1, 1.0, 40.0])

    def step(self) -> None:
        usual = [
            self.fetch,
            self.deliver,
            self.finish,
            self.commit,
            self.release,
            self.grant,
            self.write,
            self.pass_time,
        ]
        unusual = [self.fetched_late, self.revoke, self.fence, self.expire]
        self.chance.choice(usual * 4 + unusual)()

    def settle(self) -> None:
        """The listener works again, nothing is revoked any more: everything left is consumed and committed."""
        for queue in self.core.holding:
            self.core.revoke(queue)
        for _ in range(LENGTH * 3):
            self.now_s += 60.0
            for queue in NAMES:
                if queue not in self.core.holding:
                    self.core.add(queue, self.committed[queue])
                    self.place[queue] = self.committed[queue]
            self.fetch()
            self.deliver()
            self.finish()
            self.commit()
            self.release()
        for queue in NAMES:
            left = {n for n in self.wanted[queue] if self.gone[queue] <= n < self.end[queue]} - self.done[queue]
            assert not left, f"{queue}: {left} were never consumed"


@pytest.mark.parametrize("block", range(10))
def test_nothing_is_skipped_and_nothing_is_committed_that_was_not_consumed(block):
    for seed in range(block * 60, (block + 1) * 60):
        try:
            model = Model(seed)
            for _ in range(150):
                model.step()
            model.settle()
        except AssertionError:
            print("seed", seed)
            raise
