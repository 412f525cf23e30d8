"""Test of a store that is reopened: a program is killed while it produces, and its store is then opened twice."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

import psutil
import pytest

import raymq
from raymq.common.message import MessageQueue
from tests.support.clusters.cluster import (
    Sandbox,
    assert_gone,
    descendants,
    embedded,
    poll_until,
    user_environment,
    without_rays_agents,
)
from tests.support.history.workload import read_back

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
TOPIC = "numbers"
ACKNOWLEDGED_AT_LEAST = 3000

PROGRAM = """
import sys
from collections import deque
import raymq

with raymq.connect(embedded=True) as mq:
    mq.admin.create_topic("numbers", queues=4)
    mq.admin.create_topic("empty", queues=3)
    with mq.producer() as producer:
        waiting = deque()
        number = 0
        while True:
            body = b"0:%d" % number
            waiting.append((number, producer.send_async(raymq.Message("numbers", body), sharding_key=str(number))))
            number += 1
            if len(waiting) >= 2000:
                done, future = waiting.popleft()
                result = future.result()
                print(done, result.queue.broker_name, result.queue.queue_id, result.queue_offset, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Opened:
    """The contents of the store after it was opened once."""

    bodies: dict[MessageQueue, list[int]]
    topics: list[str]
    committed: list[int | None]


@dataclass(frozen=True, slots=True)
class Lives:
    """The results of a program that was killed while it produced, and of the later openings of its store.

    `acknowledged`: queue and offset of each acknowledged message, by number, as the killed program printed them.
    `opened`: the contents of the store after each later opening.
    """

    acknowledged: dict[int, tuple[MessageQueue, int]]
    opened: list[Opened]


def acknowledged_of(lines: list[str]) -> dict[int, tuple[MessageQueue, int]]:
    acknowledged = {}
    for line in lines:
        number, broker_name, queue_id, queue_offset = line.split()
        acknowledged[int(number)] = (MessageQueue(TOPIC, broker_name, int(queue_id)), int(queue_offset))
    return acknowledged


def produce_until_killed(box: Sandbox) -> tuple[list[str], list[psutil.Process]]:
    """Run the producing program and kill it while it produces. Returns the complete lines that the program printed, and
    its child processes."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=box.work,
        # Keep Ray's temporary files in the sandbox, because a killed program does not delete them.
        env={**user_environment(), "TMPDIR": str(box.root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with program:
        assert program.stdout is not None
        lines = [line for _, line in zip(range(ACKNOWLEDGED_AT_LEAST), program.stdout, strict=False)]
        processes = without_rays_agents(descendants(program.pid))
        program.kill()
        # Read the rest of the program's output from `program.stdout`, because this object has already buffered some
        # bytes. `communicate` would lose the buffered bytes, so its output would begin in the middle of a line.
        lines += [line for line in program.stdout if line.endswith("\n")]
        assert program.stderr is not None
        errors = program.stderr.read()
    assert len(lines) >= ACKNOWLEDGED_AT_LEAST, errors
    return lines, processes


def read_store(mq: raymq.Client) -> Opened:
    bodies = {queue: [sent.sequence for sent in messages] for queue, messages in read_back(mq, TOPIC).items()}
    committed = [entry.committed for entry in mq.admin.describe_group("half-way")]
    return Opened(bodies, mq.admin.list_topics(), committed)


@pytest.fixture(scope="module")
def lives(box: Sandbox) -> Lives:
    lines, processes = produce_until_killed(box)
    assert_gone(processes)  # Wait until the program's child processes have ended, because they keep the store locked.
    opened = []
    with embedded(box) as mq:
        with mq.pull_consumer("half-way", consume_from=FIRST, auto_commit=False) as consumer:
            consumer.subscribe(TOPIC)
            poll_until(consumer, ACKNOWLEDGED_AT_LEAST // 2)
            consumer.commit()
        opened.append(read_store(mq))
    with embedded(box) as mq:
        opened.append(read_store(mq))
        with mq.producer() as producer:
            producer.send(raymq.Message(TOPIC, b"1:0"))
        opened.append(read_store(mq))
    return Lives(acknowledged_of(lines), opened)


def test_everything_acknowledged_to_a_program_that_was_killed_is_there_once_in_its_place(lives: Lives) -> None:
    bodies = lives.opened[0].bodies
    assert len(lives.acknowledged) >= ACKNOWLEDGED_AT_LEAST
    misplaced = {
        number: place
        for number, place in lives.acknowledged.items()
        if bodies[place[0]][place[1] : place[1] + 1] != [number]
    }
    assert misplaced == {}
    counts = Counter(number for numbers in bodies.values() for number in numbers)
    assert set(counts.values()) == {1}
    assert all(numbers == sorted(numbers) for numbers in bodies.values())
    assert lives.opened[0].topics == ["empty", TOPIC]


def test_a_cluster_that_was_closed_and_reopened_has_the_same_messages_topics_and_offsets(lives: Lives) -> None:
    assert lives.opened[1] == lives.opened[0]
    assert sum(offset or 0 for offset in lives.opened[0].committed) == ACKNOWLEDGED_AT_LEAST // 2


def test_a_reopened_store_accepts_more_messages(lives: Lives) -> None:
    before, after = (sum(map(len, opened.bodies.values())) for opened in lives.opened[1:])
    assert after == before + 1
