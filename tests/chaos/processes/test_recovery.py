"""Tests of killed processes: each kind of process is killed with SIGKILL and restarts by itself. No acknowledged
message and no committed offset is lost."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import ray

import raymq
from raymq.client.consumer.push.subscription import PushSubscription
from raymq.common.names import PullName
from raymq.remoting.actor_ref import ActorRef
from tests.support.clusters.cluster import actor_processes, kill_actors, poll_until
from tests.support.history.listener_notes import ListenerNotes
from tests.support.history.waiting import eventually

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
TOPIC = "recovery"
STEP = 100


@dataclass(slots=True)
class Scene:
    """A producer, a push consumer and a pull consumer that continue while a test kills servers."""

    mq: raymq.Client
    producer: raymq.Producer
    subscription: PushSubscription
    notes: ListenerNotes
    reader: raymq.PullConsumer
    sent: int = 0
    read: Counter[int] = field(default_factory=Counter)

    def send(self) -> None:
        """Send some more messages and wait until every message is acknowledged."""
        futures = [
            self.producer.send_async(raymq.Message(TOPIC, b"%d" % number), sharding_key=str(number))
            for number in range(self.sent, self.sent + STEP)
        ]
        self.sent += STEP
        assert all(future.result(60).status is raymq.SendStatus.SEND_OK for future in futures)

    def committed(self) -> bool:
        """Return True if both consumer groups have committed all messages, so that no message would be
        delivered again."""
        self.reader.commit()
        return all(
            sum(entry.lag for entry in self.mq.admin.describe_group(group)) == 0 for group in ("listeners", "readers")
        )

    def consumed(self) -> bool:
        """Return True if the push consumer and the pull consumer have each received all sent messages."""
        self.read.update(int(message.body) for message in self.reader.poll(timeout_s=0.05))
        return len(self.read) == len(set(self.notes.numbers())) == self.sent

    def facts(self) -> tuple[object, ...]:
        """Return the state that the killing of a process must not change: topics with their messages, groups, and a
        group's committed offsets."""
        admin = self.mq.admin
        return (
            {topic: admin.describe_topic(topic) for topic in admin.list_topics()},
            admin.list_groups(),
            [(entry.queue, entry.committed) for entry in admin.describe_group("half-way")],
        )

    def answers(self, before: tuple[object, ...]) -> bool:
        """Return True if the servers report the same state as `before`. Returns False while a server restarts."""
        try:
            return self.facts() == before
        except raymq.RaymqError:
            return False


@pytest.fixture(scope="module")
def scene(mq: raymq.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    mq.admin.create_topic(TOPIC, queues=4)
    notes = ListenerNotes(tmp_path_factory.mktemp("notes") / "notes")
    push = mq.push_consumer("listeners", consume_from=FIRST).subscribe(TOPIC).on_message(notes)
    with (
        mq.producer() as producer,
        push.start(instances=2) as subscription,
        mq.pull_consumer("readers", consume_from=FIRST) as reader,
    ):
        reader.subscribe(TOPIC)
        made = Scene(mq, producer, subscription, notes, reader)
        made.send()
        with mq.pull_consumer("half-way", consume_from=FIRST, auto_commit=False) as consumer:
            consumer.subscribe(TOPIC)
            poll_until(consumer, STEP // 2)
            consumer.commit()
        eventually(made.consumed, "the first messages")
        yield made
        assert made.read == Counter(range(made.sent))


@pytest.mark.parametrize("actor", ["NameServer", "Broker", "Storage", "Rebalance", "Pull", "Listener"])
def test_a_killed_process_restarts_and_service_resumes(scene: Scene, actor: str) -> None:
    """All processes of one kind are killed at once, and restart. Messages are delivered again only if consumer
    processes were killed."""
    eventually(scene.committed, "everything committed")
    before = scene.facts()
    killed = actor_processes(actor)
    kill_actors(actor)
    eventually(lambda: scene.answers(before), "the same topics, groups and committed offsets as before")
    scene.send()
    eventually(lambda: len(actor_processes(actor)) == len(killed), f"as many {actor} processes as before")
    eventually(scene.consumed, "everything at both consumers")
    if actor not in ("Pull", "Listener"):
        assert scene.notes.numbers() == list(range(scene.sent))
        assert set(scene.read.values()) == {1}
    scene.mq.admin.create_topic(f"made-after-{actor}", queues=2)
    scene.mq.admin.delete_topic(f"made-after-{actor}")


def test_a_consumer_that_starts_while_its_servers_are_gone_waits_for_them(scene: Scene) -> None:
    for process in actor_processes("Storage") + actor_processes("Broker"):
        process.kill()
    with scene.mq.pull_consumer("latecomers", consume_from=FIRST) as consumer:
        consumer.subscribe(TOPIC)
        assert sorted(int(message.body) for message in poll_until(consumer, scene.sent)) == list(range(scene.sent))


PROGRAM = """
import sys
import raymq

def listen(message):
    pass

mq = raymq.connect(sys.argv[1])
subscription = mq.push_consumer("widows").subscribe("recovery").on_message(listen).start(instances=2)
print("started", flush=True)
sys.stdin.readline()
"""


def test_a_killed_program_leaves_no_consumer(scene: Scene, tmp_path: Path) -> None:
    """After a program with a consumer is killed, its Listener actors end, and the Pull actor removes the program's
    consumer instances."""
    address = ray.get_runtime_context().gcs_address
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, address],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with program:
        assert program.stdout is not None
        output = iter(program.stdout.readline, b"")  # skip lines that Ray prints between the program's own lines
        started = next((line for line in output if line == b"started\n"), b"")
        names = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
        program.kill()
        _, errors = program.communicate(timeout=30)
    assert started == b"started\n", errors.decode()
    assert {"pull-widows-0", "pull-widows-1"} <= names

    pull = ActorRef(str(PullName(scene.mq.node_id)))

    def gone() -> bool:
        return {one["instance"] for one in pull.call("status")["instances"]} == {"pull-listeners-0", "pull-listeners-1"}

    eventually(gone, "the end of its instances")
    eventually(lambda: len(actor_processes("Listener")) == 2, "the end of its Listener actors")
