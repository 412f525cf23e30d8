"""Tests of the connection of a Ray Serve process to the raymq cluster that stores its tasks. They cover creating
topics, sending messages, and looking up task states."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from raymq.client.admin.topics import QueueDescription
from raymq.client.producer.queue_selector import select_queue_by_hash
from raymq.common.errors import (
    ConfigError,
    GroupNotExistError,
    MessageIllegalError,
    ServiceNotAvailableError,
    TopicExistsError,
    TopicNotExistError,
)
from raymq.common.message import ConsumeFromWhere, Message, MessageExt, MessageQueue
from raymq.common.namespaces import NO_NAMESPACE
from raymq.common.protocol.attributes import TopicAttributes, TopicMessageType
from raymq.common.protocol.group import GroupConfig, GroupQueueProgress, GroupSummary
from raymq.common.protocol.route import TopicRoute
from raymq.serve import connection as connection_module
from raymq.serve.config import RaymqAdapterConfig
from raymq.serve.connection import TaskConnection
from raymq.serve.shared_tasks import SharedTasks
from raymq.serve.states import StateRecord, TaskState
from raymq.serve.task import Task, decode_task
from raymq.serve.task_messages import ERROR_PROPERTY_BYTES_MAX
from tests.support.clients.fakes import topic_route
from tests.support.clients.task_queues import task_message
from tests.unit.raymq.serve.test_config import settings

SETTINGS = settings({"queues": 5}, failed_task_queue_name="failed")
TASK = Task("t1", "resize", (1,), {}, 5.0)


class FakeEngine:
    """Fake engine of a simple consumer."""

    def __init__(self, group: str, options: dict[str, Any], gives_up: bool, failure: Exception | None) -> None:
        self.made = group, options, gives_up
        self.failure = failure
        self.subscribed: list[str] = []
        self.closed = False

    def subscribe(self, topic: str, expression: str) -> None:
        if self.failure is not None:
            raise self.failure
        self.subscribed.append(topic)

    def close(self) -> None:
        self.closed = True


class FakeClient:
    """Fake client of two broker groups. A message's sharding key selects the broker group; a message without a key goes
    to group `a`."""

    def __init__(self) -> None:
        self.names = NO_NAMESPACE
        self.topics: dict[str, TopicRoute] = {}
        self.groups: dict[str, GroupConfig] = {}
        self.sent: list[tuple[Message, dict[str, Any]]] = []
        self.stored: list[tuple[str, MessageExt]] = []
        """Stored task states, each as (broker group, message that holds the state)."""
        self.asked: list[str | None] = []
        self.consumers: list[FakeConsumer] = []
        self.engines: list[FakeEngine] = []
        self.closed = False
        self.summaries: list[GroupSummary] = []
        self.held: list[QueueDescription] = []
        self.subscribe_failure: Exception | None = None
        self.admin = self.routes = self
        self._offsets = itertools.count()

    def producer(self, group: str) -> FakeClient:
        return self

    def pull_consumer(self, group: str, **options: Any) -> FakeConsumer:
        self.consumers.append(FakeConsumer(group, options, self.subscribe_failure))
        return self.consumers[-1]

    def _simple_engine(self, group: str, options: dict[str, Any], *, gives_up: bool) -> FakeEngine:
        self.engines.append(FakeEngine(group, options, gives_up, self.subscribe_failure))
        return self.engines[-1]

    def brokers(self) -> frozenset[str]:
        return frozenset("ba")

    def close(self) -> None:
        self.closed = True

    # Fake of the client's routes and administration calls

    def get(self, topic: str) -> TopicRoute:
        if topic not in self.topics:
            raise TopicNotExistError(topic)
        return self.topics[topic]

    def wait(self, topic: str, timeout_s: float) -> TopicRoute:
        return self.get(topic)

    topic_route = get

    def create_topic(self, topic: str, queues: int = 20, *, message_type: TopicMessageType | None = None) -> None:
        if topic == "failed":  # another process has just created this topic
            self.topics[topic] = topic_route(topic, a=1)
            raise TopicExistsError(topic, "with 1 queue")
        route = topic_route(topic, a=queues - queues // 2, b=queues // 2)
        self.topics[topic] = replace(route, attributes=TopicAttributes(message_type or TopicMessageType.UNSPECIFIED))

    def group_config(self, group: str) -> GroupConfig:
        if group not in self.groups:
            raise GroupNotExistError(group)
        return self.groups[group]

    def create_group(self, config: GroupConfig) -> None:
        self.groups[config.group] = config

    def update_group(self, group: str, **changes: Any) -> GroupConfig:
        self.groups[group] = config = replace(self.groups[group], **changes)
        return config

    def query_by_key(self, topic: str, key: str, *, max_messages: int, broker_name: str | None) -> list[MessageExt]:
        self.asked.append(broker_name)
        return [message for broker, message in self.stored if broker_name in (None, broker)]

    def group_summary(self, group: str) -> GroupSummary:
        return self.summaries[0]

    def describe_topic(self, topic: str) -> list[QueueDescription]:
        return self.held

    # Fake of the client's producer

    def send_async(self, message: Message, **where: Any) -> Future[object]:
        self.sent.append((message, where))
        queue = select_queue_by_hash(self.topics[message.topic].all_queues, message, where.get("sharding_key") or "")
        if message.topic == SETTINGS.results:
            self.store(message.body, queue.broker_name)
        future: Future[object] = Future()
        future.set_result(object())
        return future

    def send(self, message: Message) -> None:
        self.send_async(message)

    def store(self, body: bytes, broker_name: str) -> None:
        self.stored.append((broker_name, task_message(body, next(self._offsets))))


class FakeConsumer:
    def __init__(self, group: str, options: dict[str, Any], failure: Exception | None) -> None:
        self.group, self.options, self._failure = group, options, failure
        self.topics: list[str] = []
        self.closed = False

    def subscribe(self, topic: str) -> None:
        if self._failure is not None:
            raise self._failure
        self.topics.append(topic)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    client = FakeClient()
    monkeypatch.setattr(connection_module, "connect", lambda address, namespace: client)
    return client


@pytest.fixture
def tasks(client: FakeClient) -> TaskConnection:
    return TaskConnection.open(SETTINGS)


def report_states(tasks: TaskConnection, *states: TaskState, task_id: str = "t1") -> None:
    for state in states:
        record = StateRecord(task_id, state, 1.0)
        tasks.tell(record, record.encode()).result()


def test_topics_and_the_group_are_made_unless_they_exist(client):
    client.topics["jobs"] = topic_route("jobs", a=2)
    TaskConnection.open(SETTINGS)
    assert {topic: len(route.all_queues) for topic, route in client.topics.items()} == {
        "jobs": 2,
        "jobs-results": 5,
        "failed": 1,
    }
    assert client.groups == {"serve-jobs": GroupConfig("serve-jobs", retry_queue_nums=3)}
    client.groups["serve-jobs"] = mine = GroupConfig("serve-jobs", retry_queue_nums=1)
    TaskConnection.open(SETTINGS)
    assert client.groups["serve-jobs"] is mine


def test_only_the_task_queue_is_a_priority_topic_and_a_queue_of_the_other_type_is_refused(client):
    options = RaymqAdapterConfig(queues=5, priorities=True, consume_mode="share")
    leveled = replace(SETTINGS, options=options)
    tasks = TaskConnection.open(leveled)
    tasks.send(TASK, StateRecord.of(TASK, TaskState.PENDING, 5.0), deliver_at_ms=None, sharding_key=None, priority=7)
    assert [message.priority for message, _ in client.sent] == [7, None]
    has_levels = {topic: route.attributes.has_levels for topic, route in client.topics.items()}
    assert has_levels == {"jobs": True, "jobs-results": False, "failed": False}
    with pytest.raises(ConfigError, match="topic 'jobs' is of the type PRIORITY: set priorities=True"):
        TaskConnection.open(SETTINGS)
    client.topics["jobs"] = topic_route("jobs", a=2)
    with pytest.raises(ConfigError, match="topic 'jobs' is of the type UNSPECIFIED"):
        TaskConnection.open(leveled)


@pytest.mark.parametrize(("stored", "kept"), [("7", 7), ("12", 9), ("", None)])
def test_a_copy_in_a_dead_queue_has_the_tasks_priority(client, tasks, stored, kept):
    message = replace(task_message(TASK.encode(), 1), system_properties={"_SYS_MSG_PRIORITY_": stored})
    tasks.copy(message, "failed", "no")
    assert client.sent[-1][0].priority == kept


def test_a_new_or_known_group_gets_the_retry_intervals_of_the_settings(client):
    own = replace(SETTINGS, options=RaymqAdapterConfig(queues=5, retry_intervals_s=(0.5, 60)))
    TaskConnection.open(own)
    assert client.groups["serve-jobs"].retry_intervals_s == (0.5, 60.0)
    client.groups["serve-jobs"] = GroupConfig("serve-jobs", retry_max_times=3)
    TaskConnection.open(own)
    assert client.groups["serve-jobs"] == GroupConfig("serve-jobs", retry_max_times=3, retry_intervals_s=(0.5, 60.0))
    TaskConnection.open(SETTINGS)
    assert client.groups["serve-jobs"].retry_intervals_s == (0.5, 60.0)


def test_a_connection_that_cannot_be_prepared_is_closed(client, monkeypatch):
    def refuse(group):
        raise ServiceNotAvailableError("no broker")

    monkeypatch.setattr(client, "group_config", refuse)
    with pytest.raises(ServiceNotAvailableError):
        TaskConnection.open(SETTINGS)
    assert client.closed


def test_a_task_is_sent_with_its_first_state(client, tasks):
    state = StateRecord.of(TASK, TaskState.PENDING, 5.0)
    tasks.send(TASK, state, deliver_at_ms=1_700_000_000_000, sharding_key="user-9")
    (message, where), (report_states, to_where) = client.sent
    assert (message.topic, decode_task(message.body), message.keys) == ("jobs", TASK, ("t1",))
    assert (message.properties, message.deliver_at_ms, where) == (
        {"task": "resize"},
        1_700_000_000_000,
        {"sharding_key": "user-9"},
    )
    assert (report_states.topic, report_states.tags, report_states.keys, to_where) == (
        "jobs-results",
        "PENDING",
        ("t1",),
        {"sharding_key": "t1"},
    )


def test_states_are_read_from_the_queue_that_stores_them(client, tasks):
    places = set()
    for number in range(20):
        task_id = f"t{number}"
        client.stored.clear()
        report_states(tasks, TaskState.PENDING, TaskState.STARTED, task_id=task_id)
        client.asked.clear()
        latest = tasks.history(task_id).latest
        assert latest is not None
        assert latest.state is TaskState.STARTED
        [place] = client.asked
        places.add(place)
    assert places == {"a", "b"}


def test_a_task_whose_first_state_is_not_there_is_looked_for_everywhere(client, tasks):
    report_states(tasks, TaskState.STARTED)
    [(own, _)] = client.stored
    pending = StateRecord("t1", TaskState.REVOKED, 1.0)
    client.store(pending.encode(), "b" if own == "a" else "a")
    latest = tasks.history("t1").latest
    assert latest is not None
    assert (latest.state, client.asked) == (TaskState.REVOKED, [own, None])


def test_messages_of_others_in_the_result_topic_are_passed_over(client, tasks):
    report_states(tasks, TaskState.PENDING)
    [(own, _)] = client.stored
    client.store(b"no state", own)
    client.store(StateRecord("t2", TaskState.SUCCESS, 1.0).encode(), own)
    latest = tasks.history("t1").latest
    assert latest is not None
    assert latest.state is TaskState.PENDING


def test_an_unavailable_broker_is_a_clear_error(client, tasks):
    both = client.topics["jobs-results"]
    for broker_name in ("a", "b"):
        brokers = {broker_name: both.brokers[broker_name]}
        queues = tuple(data for data in both.queues if data.broker_name == broker_name)
        client.topics["jobs-results"] = TopicRoute("jobs-results", brokers, queues, layout="a:3;b:2")
        if select_queue_by_hash(both.all_queues, Message("jobs", b"-"), "t1").broker_name != broker_name:
            with pytest.raises(ServiceNotAvailableError, match="has the states of task 't1'"):
                tasks.history("t1")
        else:
            assert tasks.history("t1").latest is None


def test_a_replica_acknowledges_each_task_and_each_retry(client, tasks, modes):
    tasks.consumer()
    [consumer] = client.consumers
    assert (consumer.group, consumer.topics) == ("serve-jobs", ["jobs", "%RETRY%serve-jobs"])
    assert consumer.options["acknowledge_each"]
    assert consumer.options["consume_from"] is ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
    client.subscribe_failure = ServiceNotAvailableError("no broker")
    with pytest.raises(ServiceNotAvailableError):
        tasks.consumer()
    assert client.consumers[-1].closed


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("ValueError: no", "ValueError: no"),
        ("two\nlines\x01", "two lines"),
        ("", "-"),
        ("\ud800", "-"),
        ("ü" * 5000, "ü" * (ERROR_PROPERTY_BYTES_MAX // 2)),
    ],
)
def test_a_copy_has_the_reason_as_a_property(client, tasks, error, shown):
    tasks.copy(task_message(b"body", 1), "failed", error)
    [(message, _)] = client.sent
    assert (message.topic, message.body, message.properties) == ("failed", b"body", {"error": shown})


def test_a_copy_without_space_for_the_reason_has_nothing_else(client, tasks, monkeypatch):
    send = client.send

    def refuse_long(message):
        if len(message.properties) > 1:
            raise MessageIllegalError("properties too long")
        send(message)

    monkeypatch.setattr(client, "send", refuse_long)
    original = task_message(b"body", 1)
    tasks.copy(replace(original, properties={"mine": "long"}), "failed", "no")
    [(message, _)] = client.sent
    assert (message.body, message.properties) == (b"body", {"error": "no"})


def test_before_the_first_replica_every_task_that_is_held_counts(client, tasks):
    client.summaries = [GroupSummary("serve-jobs", (), 0, 0, 2, 1)]
    client.held = [
        QueueDescription(MessageQueue("jobs", "a", 0), 5, 9),
        QueueDescription(MessageQueue("jobs", "b", 0), 0, 3),
    ]
    summary = tasks.summary()
    assert (summary.lag, summary.retry_lag, summary.dead_letters) == (7, 2, 1)
    progress = GroupQueueProgress("serve-jobs", MessageQueue("jobs", "a", 0), 5, 5, 9)
    client.summaries = [known := GroupSummary("serve-jobs", (progress,), 4, 8, 0, 0)]
    assert tasks.summary() is known


@pytest.fixture
def modes(monkeypatch) -> list[tuple[str, str, list[str]]]:
    """Replace the check of the group's mode, and return its calls."""
    calls: list[tuple[str, str, list[str]]] = []
    monkeypatch.setattr(connection_module, "check_modes", lambda *args: calls.append(args))
    return calls


def test_in_the_mode_share_a_replica_leases_single_tasks_and_gives_none_up(client, modes):
    shared = replace(SETTINGS, options=RaymqAdapterConfig(consume_mode="share"))
    source = TaskConnection(client, shared).consumer()
    assert isinstance(source, SharedTasks)
    [engine] = client.engines
    group, options, gives_up = engine.made
    assert (group, gives_up, options["auto_renew"], options["ordered"]) == ("serve-jobs", False, True, False)
    assert (engine.subscribed, client.consumers) == (["jobs"], [])
    assert modes == [("serve-jobs", "share", ["a", "b"])]
    source.close()
    assert engine.closed


def test_a_shared_consumer_that_cannot_subscribe_is_closed(client, modes):
    client.subscribe_failure = ServiceNotAvailableError("no NameServer")
    shared = replace(SETTINGS, options=RaymqAdapterConfig(consume_mode="share"))
    with pytest.raises(ServiceNotAvailableError):
        TaskConnection(client, shared).consumer()
    assert client.engines[0].closed
