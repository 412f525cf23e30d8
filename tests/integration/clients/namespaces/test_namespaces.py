"""Tests of namespaces: two teams use the same names of topics and groups in two namespaces. Neither team sees the other
team's data through any API."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import raymq
from raymq.common.errors import GroupNotExistError, TopicNotExistError
from raymq.common.names import dlq_topic
from tests.support.clusters.cluster import user_environment
from tests.support.clusters.commands import run_here
from tests.support.clusters.page_example import assert_prints_what_it_says, run_program
from tests.support.history.waiting import eventually

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
TEAMS = ("team-a", "team-b")


@pytest.fixture(scope="module")
def teams(mq: raymq.Client) -> Iterator[list[raymq.Client]]:
    """Yield a client for each of the two teams. Each team has its own topic `orders`."""
    with raymq.connect(namespace=TEAMS[0]) as one, raymq.connect(namespace=TEAMS[1]) as two:
        for client in (one, two):
            client.admin.create_topic("orders", queues=2)
        yield [one, two]


def polled(client: raymq.Client, topic: str, group: str, count: int) -> list[raymq.MessageExt]:
    with client.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe(topic)
        found: list[raymq.MessageExt] = []
        eventually(lambda: found.extend(consumer.poll(timeout_s=1.0)) or len(found) >= count, f"{count} messages")
        assert {queue.topic for queue in consumer.assignment()} == {topic}
        assert consumer.group == group
        consumer.commit()
    return found


def test_the_same_names_are_other_topics_and_groups(mq: raymq.Client, teams: list[raymq.Client]) -> None:
    for team, client in zip(TEAMS, teams, strict=True):
        with client.producer("shop") as producer:
            sent = [producer.send(raymq.Message("orders", f"{team}-{i}".encode(), keys=["k"])) for i in range(3)]
            sent += producer.send_batch([raymq.Message("orders", f"{team}-b{i}".encode()) for i in range(100)])
            sent.append(producer.send_async(raymq.Message("orders", f"{team}-s".encode()), sharding_key="u").result())
        assert {result.queue.topic for result in sent} == {"orders"}
    for team, client in zip(TEAMS, teams, strict=True):
        messages = polled(client, "orders", "billing", 104)
        assert len(messages) == 104
        assert {message.topic for message in messages} == {"orders"}
        assert all(message.body.startswith(team.encode()) for message in messages)
        [one, *_] = client.admin.query_by_key("orders", "k")
        assert (one.topic, one.queue.topic) == ("orders", "orders")
        progress = client.admin.describe_group("billing")
        assert {entry.queue.topic for entry in progress} == {"orders"}
        assert client.admin.list_topics() == ["orders"]
        assert client.admin.list_groups() == ["billing"]
    assert {"team-a%orders", "team-b%orders"} <= set(mq.admin.list_topics())
    with mq.producer() as producer, pytest.raises(TopicNotExistError):
        producer.send(raymq.Message("orders-of-nobody", b"x"))


def test_a_table_has_the_names_of_its_namespace(teams: list[raymq.Client]) -> None:
    pa = pytest.importorskip("pyarrow")
    client = teams[0]
    client.admin.create_topic("tables", queues=1)
    with client.producer() as producer:
        producer.send_table("tables", pa.table({"body": [b"a", b"b"]}))
    with client.pull_consumer("reader", consume_from=FIRST) as consumer:
        consumer.subscribe("tables")
        table = eventually(lambda: found if len(found := consumer.poll_table(timeout_s=1.0)) else None, "the rows")
        [queue] = consumer.assignment()
        assert consumer.commit() == {queue: 2}
        assert consumer.committed(queue) == 2
        assert consumer.lag() == {queue: 0}
        consumer.seek_to_begin(queue)
        assert consumer.position(queue) == 0
        consumer.pause([queue])
        assert consumer.paused() == [queue]
        assert consumer.begin_offsets([queue]) == {queue: 0}
        assert consumer.fetch_message_queues("tables") == [queue]
    assert table.column("topic").to_pylist() == ["tables", "tables"]


class Listener:
    """A test listener that records its messages. It fails once for each message with the body "again", and sends
    messages with the body "dead" to the dead-letter queue."""

    def __init__(self, notes: str) -> None:
        self.notes = notes

    def __call__(self, message: raymq.MessageExt) -> raymq.ConsumeLater | None:
        with open(self.notes, "a") as file:
            file.write(json.dumps([message.topic, message.body.decode(), message.reconsume_times]) + "\n")
        if message.body == b"dead":
            return raymq.ConsumeLater(-1)
        if message.body == b"again" and message.reconsume_times == 0:
            raise ValueError("once more")
        return None


def test_listeners_retries_and_dead_letters_know_the_names_of_their_namespace(
    teams: list[raymq.Client], tmp_path: Path
) -> None:
    client, other = teams
    for one in teams:
        one.admin.create_topic("jobs", queues=1)
    notes = tmp_path / "notes"

    def noted() -> list[Any]:
        return [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []

    with client.producer() as producer:
        for body in (b"good", b"again", b"dead"):
            producer.send(raymq.Message("jobs", body))
    consumer = client.push_consumer("workers", consume_from=FIRST).subscribe("jobs").on_message(Listener(str(notes)))
    with consumer.start() as running:
        assert running.group == "workers"
        eventually(lambda: ["jobs", "again", 1] in noted(), "the retry", 120)
        assert {queue.topic for queue in running.queues()} <= {"jobs", "%RETRY%workers"}
        letters = eventually(lambda: client.admin.dead_letters("workers").letters(), "the dead letter")
    assert {row[0] for row in noted()} == {"jobs"}
    [letter] = letters
    assert (letter.topic, letter.message.body) == ("jobs", b"dead")
    with pytest.raises(GroupNotExistError):
        other.admin.dead_letters("workers").letters()
    assert client.admin.pull(raymq.MessageQueue(dlq_topic("workers"), letter.message.broker_name, 0), 0).messages


def test_simple_consumers_transactions_and_delays(teams: list[raymq.Client]) -> None:
    for one in teams:
        one.admin.create_topic("payments", queues=1)
    client, other = teams
    seen = []

    def check(message: raymq.MessageExt) -> raymq.LocalTransactionState:
        seen.append(message.topic)
        return raymq.LocalTransactionState.COMMIT_MESSAGE

    with client.transaction_producer("bank", check=check) as producer:
        with producer.transaction(raymq.Message("payments", b"paid")):
            pass
        result = producer.send_in_transaction(
            raymq.Message("payments", b"asked"), lambda transaction, argument: None, check_immunity_s=1
        )
        assert result.queue.topic != "team-a%payments"
        eventually(lambda: seen == ["payments"], "the check", 120)
    with client.producer() as producer:
        due_ms = time.time_ns() // 1_000_000
        producer.send(raymq.Message("payments", b"soon", deliver_at_ms=due_ms + 1000))
        later = producer.send(raymq.Message("payments", b"never", deliver_at_ms=due_ms + 3_600_000))
        producer.recall("payments", later.recall_handle or "")
    with client.simple_consumer("auditors", consume_from=FIRST) as consumer:
        consumer.subscribe("payments")
        received: list[Any] = []

        def receive() -> bool:
            messages = consumer.receive(wait_s=1)
            received.extend((message.topic, message.body) for message in messages)
            return consumer.ack(messages) == len(messages) and len(received) >= 3

        eventually(receive, "three messages", 120)
    assert sorted(received) == [("payments", body) for body in (b"asked", b"paid", b"soon")]
    assert all(row.max_offset == 0 for row in other.admin.describe_topic("payments"))


def test_requests_are_answered_within_a_namespace(teams: list[raymq.Client]) -> None:
    for one in teams:
        one.admin.create_topic("questions", queues=1)
    listeners = [
        client.push_consumer("answerers")
        .subscribe("questions")
        .on_message(lambda message, team=team: raymq.reply(f"{team} {message.topic}".encode()))
        .start()
        for team, client in zip(TEAMS, teams, strict=True)
    ]
    try:
        for team, client in zip(TEAMS, teams, strict=True):
            with client.producer() as producer:
                answer = producer.request(raymq.Message("questions", b"who?"), timeout_s=60)
            assert answer.body == f"{team} questions".encode()
    finally:
        for listener in listeners:
            listener.stop()


def test_the_example_of_the_page_prints_the_documented_output(teams: list[raymq.Client]) -> None:
    assert_prints_what_it_says("namespaces.md")


def test_ray_data_is_within_a_namespace(teams: list[raymq.Client]) -> None:
    client, other = teams
    for one in teams:
        one.admin.create_topic("rows", queues=2)
    with client.producer() as producer:
        producer.send_batch([raymq.Message("rows", b"%d" % i) for i in range(100)])
    found = run_program(
        """
import json
import raymq.data

rows = raymq.data.read_topic("rows", namespace="team-a")
counted = rows.count()
names = rows.unique("topic")
raymq.data.write_topic(rows.select_columns(["value"]).limit(10), "rows", body_field="value", namespace="team-a")
print(json.dumps([counted, names]))
"""
    )
    assert json.loads(found) == [100, ["rows"]]
    assert sum(row.max_offset for row in client.admin.describe_topic("rows")) == 110
    assert all(row.max_offset == 0 for row in other.admin.describe_topic("rows"))


def test_the_command_line_is_within_a_namespace(teams: list[raymq.Client]) -> None:
    options = ["--json", "--address", ray.get_runtime_context().gcs_address]

    def run(*arguments: str, **environment: str) -> Any:
        done = run_here(*arguments, *options, **environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    # A process of its own reads the namespace from its environment.
    alone = subprocess.run(
        [str(Path(sys.executable).with_name("raymq")), "topic", "list", *options],
        env={**user_environment(), "RAYMQ_NAMESPACE": "team-a"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    assert json.loads(alone.stdout) == run("--namespace", "team-a", "topic", "list")
    assert "orders" in str(run("--namespace", "team-a", "topic", "list"))
    assert "team-b" not in str(run("--namespace", "team-a", "topic", "list"))
    [sent] = run("--namespace", "team-a", "send", "orders", "by hand")["sent"]
    assert sent["queue"].startswith("orders@")
    assert run("query", "orders", "--id", sent["message_id"], RAYMQ_NAMESPACE="team-a")["topic"] == "orders"
