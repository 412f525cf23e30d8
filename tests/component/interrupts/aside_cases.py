"""Test cases of aside_program: a call with its arguments and checks for each public method that runs in a helper
thread.

The calls use a real client of the servers that tests.support.clusters.local_cluster starts. A class that is tested here
needs a case for each of its public methods.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

import raymq
from raymq.client.admin.dead_letters import DeadLetters
from raymq.client.client import Client
from raymq.common.errors import (
    GroupNotExistError,
    InvalidArgumentError,
    RaymqError,
    RecallError,
)
from raymq.common.message import Message, MessageExt, MessageQueue
from raymq.common.names import INSTANCES
from raymq.common.protocol.group import GroupConfig
from raymq.common.protocol.transactions import LocalTransactionState
from raymq.serve.connection import TaskConnection
from raymq.serve.states import StateRecord, TaskState
from raymq.serve.task import Task
from tests.component.interrupts.interrupter import REQUEST_TIMEOUTS
from tests.support.clusters.local_cluster import LocalRay
from tests.support.history.waiting import eventually
from tests.unit.raymq.serve.test_config import settings as task_settings

TOPIC: Final = "orders"
BROKER: Final = "broker-a"
FIRST: Final = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
Q0, Q1 = MessageQueue(TOPIC, BROKER, 0), MessageQueue(TOPIC, BROKER, 1)
INVISIBLE_S: Final = 0.1
WAIT_S: Final = 30.0
ROWS: Final = pa.table({"body": [b"row 1", b"row 2"]})


def nothing() -> None:
    """Do nothing. A test case uses this function if its call needs no preparation, or no check afterwards."""


@dataclass(frozen=True)
class Case:
    """A test case: a call that the test interrupts, the steps before and after each attempt, and the error that the
    call raises without an interrupt."""

    call: Callable[[], object]
    before: Callable[[], object] = nothing
    after: Callable[[], object] = nothing
    error: type[RaymqError] | tuple[type[RaymqError], ...] | None = None


def hear(message: MessageExt) -> None:
    """Message listener that does nothing."""


class Hook:
    """Consume hook that does nothing."""

    def before(self, context: Any) -> None:
        pass

    def after(self, context: Any) -> None:
        pass


class World:
    """A client, and the producer, consumers and other objects that the test cases call."""

    def __init__(self, cluster: LocalRay, root: Path) -> None:
        """`root`: a directory for files that calls write."""
        self.cluster, self.root = cluster, root
        self._numbers = itertools.count()
        self.mq = raymq.connect()
        self.admin = self.mq.admin
        self.admin.create_topic(TOPIC, queues=2)
        self.producer = self.mq.producer("works")
        self.consumer = self.mq.pull_consumer("works", consume_from=FIRST)
        self.consumer.subscribe(TOPIC)
        self.message = self.works()
        self.new: Any = None
        """The object that the `before` step of the present test case has created for its call."""

    def name(self, what: str) -> str:
        """Return an unused name, which begins with `what`."""
        return f"{what}-{next(self._numbers)}"

    def works(self) -> MessageExt:
        """Check that the client works: send a message and poll until the message arrives."""
        body = self.name("works").encode()
        self.producer.send(Message(TOPIC, body, keys=["k"]))
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            for message in self.consumer.poll(100, 1.0):
                if message.body == body:
                    self.consumer.commit()
                    return message
        raise AssertionError(f"{body!r} did not come")

    def make(self, what: Callable[[], object]) -> Callable[[], None]:
        """Return a function for the step `before` of a test case. It calls `what`, and stores the created object in
        `self.new`."""

        def prepare() -> None:
            self.new = what()

        return prepare

    def close_new(self) -> None:
        self.new.close()

    def on_new(self, method: str) -> Callable[[], object]:
        """Return the call of a test case: a function that calls `method` of the object that the `before` step has
        stored in `new`."""

        def call() -> object:
            return getattr(self.new, method)()

        return call

    # Test cases, by the kind of client object whose calls they interrupt

    def cases(self) -> dict[str, dict[str, Case]]:
        return {
            "Client": self.client(),
            "Producer": self.producers(),
            "TransactionProducer": self.transactions(),
            "RepeatableWriter": self.writers(),
            "Admin": {**self.topics(), **self.groups(), **self.messages(), **self.upkeep()},
            "DeadLetters": self.dead_letters(),
            "PullConsumer": self.pulling(),
            "SimpleConsumer": self.receiving(),
            "PushConsumer": self.describing(),
            "PushSubscription": self.listening(),
            "TaskConnection": self.tasks(),
        }

    def client(self) -> dict[str, Case]:
        def connect() -> Client:
            client = raymq.connect()
            client.producer().send_async(Message(TOPIC, b"handed over"))
            client.simple_consumer("closing").subscribe(TOPIC)
            return client

        def closed() -> None:
            """Check that all objects of the client are closed, either by the interrupted call of `close` or by the call
            of `close` in this function."""
            self.new.close()
            eventually(lambda: not self.new._open, "all of a closed client is closed", WAIT_S)

        mq = self.mq
        return {
            "async_producer": Case(lambda: mq.async_producer("a")),
            "close": Case(self.close_new, self.make(connect), closed),
            "producer": Case(lambda: mq.producer("a").send(Message(TOPIC, b"of a new producer"))),
            "pull_consumer": Case(lambda: self.new.pull_consumer("p"), self.make(raymq.connect), closed),
            "push_consumer": Case(lambda: mq.push_consumer("p")),
            "repeatable_writer": Case(
                lambda: mq.repeatable_writer(TOPIC, producer_id=self.name("w")).close(),
            ),
            "simple_consumer": Case(lambda: self.new.simple_consumer("s"), self.make(raymq.connect), closed),
            "trace_statistics": Case(mq.trace_statistics),
            "transaction_producer": Case(
                lambda: self.new.transaction_producer("t", check=lambda message: None),
                self.make(raymq.connect),
                closed,
            ),
            "write_queues": Case(lambda: mq.write_queues(TOPIC)),
        }

    def producers(self) -> dict[str, Case]:
        producer = self.producer
        self.admin.create_topic("requests", queues=1)
        request = Message("requests", b"?")

        def no_request_waits() -> None:
            eventually(lambda: not producer._requests().pending._open, "no request waits", WAIT_S)  # type: ignore[union-attr]

        return {
            "begin_request": Case(lambda: producer.begin_request(request, 0.05)),
            "close": Case(self.close_new, self.make(self.mq.producer), self.close_new),
            "flush": Case(producer.flush, lambda: producer.send_oneway(Message(TOPIC, b"flushed"))),
            "recall": Case(lambda: producer.recall(TOPIC, "no-handle"), error=RecallError),
            "reply": Case(lambda: producer.reply(self.message, b"!"), error=raymq.CreateReplyMessageError),
            "request": Case(lambda: producer.request(request, timeout_s=0.05), error=REQUEST_TIMEOUTS),
            "request_async": Case(lambda: producer.request_async(request, timeout_s=0.05)),
            "send_table": Case(lambda: producer.send_table(TOPIC, ROWS)),
        }

    def transactions(self) -> dict[str, Case]:
        committed = LocalTransactionState.COMMIT_MESSAGE

        def make() -> Any:
            return self.mq.transaction_producer("transactions", check=lambda message: committed)

        def begin() -> None:
            self.new = transactions.transaction(Message(TOPIC, b"of a transaction"))

        transactions = make()
        return {
            "close": Case(self.close_new, self.make(make), self.close_new),
            "end": Case(lambda: transactions.end(self.new, committed), begin),
            "send_in_transaction": Case(
                lambda: transactions.send_in_transaction(Message(TOPIC, b"in a transaction"), lambda *_: committed)
            ),
            "transaction": Case(lambda: transactions.transaction(Message(TOPIC, b"a half message"))),
        }

    def writers(self) -> dict[str, Case]:
        def make() -> Any:
            return self.mq.repeatable_writer(TOPIC, producer_id=self.name("writer"))

        def written() -> None:
            make()
            self.new = make()
            self.new.write(ROWS)

        return {
            "close": Case(self.close_new, self.make(make), self.close_new),
            "finish": Case(self.on_new("finish"), written, self.close_new),
            "write": Case(lambda: self.new.write(ROWS), self.make(make), self.close_new),
        }

    def topics(self) -> dict[str, Case]:
        admin = self.admin
        admin.create_topic("changed", queues=1)

        def create() -> None:
            self.new = self.name("gone")
            admin.create_topic(self.new, queues=1)

        def is_there() -> None:
            """Check that the interrupted call, which creates a topic, left the topic's name usable: creating the topic
            succeeds, whether the topic exists or not."""
            admin.create_topic(self.new, queues=1)

        def named() -> str:
            return self.name("made")

        return {
            "create_topic": Case(lambda: admin.create_topic(self.new, queues=1), self.make(named), is_there),
            "create_topics": Case(lambda: admin.create_topics({self.new: 1}), self.make(named), is_there),
            "delete_topic": Case(lambda: admin.delete_topic(self.new), create),
            "update_topic": Case(lambda: admin.update_topic("changed", queues=2)),
            "describe_topic": Case(lambda: admin.describe_topic(TOPIC)),
            "kept_since": Case(lambda: admin.kept_since(TOPIC)),
            "list_topics": Case(admin.list_topics),
            "offset_by_time": Case(lambda: admin.offset_by_time(Q0, 0)),
            "order_config": Case(lambda: admin.order_config(TOPIC)),
            "set_order_config": Case(lambda: admin.set_order_config("changed", None)),
            "topic_attributes": Case(lambda: admin.topic_attributes([TOPIC])),
            "topic_route": Case(lambda: admin.topic_route(TOPIC)),
            "topic_routes": Case(lambda: admin.topic_routes([TOPIC])),
            "topic_stats": Case(lambda: admin.topic_stats(TOPIC)),
            "light_queues": Case(admin.light_queues),
            "check_queues": Case(lambda: admin.check_queues(TOPIC)),
        }

    def groups(self) -> dict[str, Case]:
        admin = self.admin
        admin.create_group(GroupConfig("idle"))
        admin.create_group(GroupConfig("target"))

        def create() -> None:
            self.new = self.name("gone")
            admin.create_group(GroupConfig(self.new))

        return {
            "allow": Case(lambda: admin.allow("idle", TOPIC)),
            "forbid": Case(lambda: admin.forbid("idle", TOPIC)),
            "forbidden_topics": Case(lambda: admin.forbidden_topics("idle")),
            "clone_offsets": Case(lambda: admin.clone_offsets("works", "target", TOPIC)),
            "create_group": Case(lambda: admin.create_group(GroupConfig("idle"))),
            "create_groups": Case(lambda: admin.create_groups([GroupConfig("idle")])),
            "delete_group": Case(lambda: admin.delete_group(self.new), create),
            "delete_offsets": Case(lambda: admin.delete_offsets("target", TOPIC)),
            "describe_group": Case(lambda: admin.describe_group("works")),
            "group_config": Case(lambda: admin.group_config("works")),
            "group_stats": Case(lambda: admin.group_stats("works")),
            "group_summary": Case(lambda: admin.group_summary("works")),
            "list_groups": Case(admin.list_groups),
            "reset_offsets": Case(lambda: admin.reset_offsets("idle", TOPIC, "earliest")),
            "update_group": Case(lambda: admin.update_group("idle", retry_max_times=3)),
            "dead_letters": Case(lambda: admin.dead_letters("works")),
            "consumer_connections": Case(admin.consumer_connections),
            "producer_connections": Case(admin.producer_connections),
            "running_info": Case(lambda: admin.running_info("works", timeout_s=0.5)),
            "consume_directly": Case(
                lambda: admin.consume_directly("works", self.message, timeout_s=0.5), error=InvalidArgumentError
            ),
        }

    def messages(self) -> dict[str, Case]:
        admin, message = self.admin, self.message
        return {
            "browse": Case(lambda: admin.browse(TOPIC, limit=2)),
            "delayed": Case(admin.delayed),
            "message_track": Case(lambda: admin.message_track(message)),
            "pull": Case(lambda: admin.pull(Q0, 0)),
            "query_by_id": Case(lambda: admin.query_by_id(TOPIC, message.message_id)),
            "query_by_key": Case(lambda: admin.query_by_key(TOPIC, "k", max_messages=2)),
            "replay": Case(lambda: admin.replay(TOPIC, ids=[message.message_id], to_topic="changed", dry_run=True)),
            "tail": Case(lambda: admin.tail(TOPIC)),
            "trace": Case(lambda: admin.trace(message.message_id, topic=TOPIC, trace_topic="changed")),
            "transactions": Case(admin.transactions),
        }

    def upkeep(self) -> dict[str, Case]:
        admin = self.admin
        document = admin.export_metadata(topics="changed", groups="idle")
        setting = "store.delete_when"
        return {
            "add_write_perm": Case(lambda: admin.add_write_perm(BROKER)),
            "brokers": Case(admin.brokers),
            "clean_store": Case(lambda: admin.clean_store(BROKER)),
            "clusters": Case(admin.clusters),
            "config": Case(admin.config),
            "set_config": Case(lambda: admin.set_config(setting, "05")),
            "unset_config": Case(lambda: admin.unset_config(setting)),
            "set_broker_writable": Case(lambda: admin.set_broker_writable(BROKER, True)),
            "export_metadata": Case(lambda: admin.export_metadata(topics="changed", groups="idle")),
            "import_metadata": Case(lambda: admin.import_metadata(document)),
            "put_kv": Case(lambda: admin.put_kv("n", "k", "v")),
            "get_kv": Case(lambda: admin.get_kv("n", "k")),
            "list_kv": Case(lambda: admin.list_kv("n")),
            "delete_kv": Case(lambda: admin.delete_kv("n", "other")),
            "readings": Case(admin.readings),
            "store_statistics": Case(lambda: admin.store_statistics(BROKER)),
            "damage": Case(admin.damage),
            "export_damage": Case(
                lambda: admin.export_damage(self.new, {}), self.make(lambda: str(self.root / self.name("exported")))
            ),
            "verification": Case(admin.verification),
            "verify_stores": Case(lambda: admin.verify_stores(BROKER, timeout_s=0.0)),
            # This cluster has no Controller, which changes replicas.
            "replicas": Case(lambda: admin.replicas(BROKER), error=RaymqError),
            "change_replicas": Case(lambda: admin.change_replicas(BROKER, 3), error=RaymqError),
            "change_min_in_sync_replicas": Case(lambda: admin.change_min_in_sync_replicas(BROKER, 2), error=RaymqError),
            "cancel_replica_change": Case(lambda: admin.cancel_replica_change(BROKER), error=RaymqError),
            "wait_for_replicas": Case(lambda: admin.wait_for_replicas(BROKER, timeout_s=0.5), error=RaymqError),
            "wipe_write_perm": Case(lambda: admin.wipe_write_perm(BROKER), after=lambda: admin.add_write_perm(BROKER)),
            "create_user": Case(lambda: admin.create_user("u", "a secret of some length"), error=RaymqError),
            "update_user": Case(lambda: admin.update_user("u", enabled=False), error=RaymqError),
            "delete_user": Case(lambda: admin.delete_user("u"), error=RaymqError),
            "create_policy": Case(lambda: admin.create_policy("u", "Topic:*", ["Pub"]), error=RaymqError),
            "update_policy": Case(lambda: admin.update_policy("u", "Topic:*", ["Pub"]), error=RaymqError),
            "delete_policy": Case(lambda: admin.delete_policy("u"), error=RaymqError),
            "user": Case(lambda: admin.user("u"), error=RaymqError),
            "users": Case(admin.users, error=RaymqError),
        }

    def dead_letters(self) -> dict[str, Case]:
        letters: DeadLetters = self.admin.dead_letters("works")
        return {
            "each": Case(letters.each),
            "letters": Case(letters.letters),
        }

    def pulling(self) -> dict[str, Case]:
        consumer, own = self.consumer, self.mq.pull_consumer("pulling")
        own.assign([Q0, Q1])
        queue = self.message.queue

        def make() -> Any:
            made = self.mq.pull_consumer("closing")
            made.assign([Q0])
            return made

        def subscribe() -> None:
            self.new = self.mq.pull_consumer("subscribing")
            self.new.subscribe(TOPIC)

        return {
            "assign": Case(lambda: own.assign([Q0, Q1])),
            "begin_offsets": Case(lambda: consumer.begin_offsets([Q0, Q1])),
            "close": Case(self.close_new, self.make(make), self.close_new),
            "commit": Case(consumer.commit),
            "committed": Case(lambda: consumer.committed(Q0)),
            "end_offsets": Case(lambda: consumer.end_offsets([Q0])),
            "fetch_message_queues": Case(lambda: consumer.fetch_message_queues(TOPIC)),
            "lag": Case(consumer.lag),
            "offset_for_timestamp": Case(lambda: consumer.offset_for_timestamp(Q0, 0)),
            "offsets_for_times": Case(lambda: consumer.offsets_for_times({Q0: 0})),
            "pause": Case(lambda: own.pause([Q0])),
            "register_queue_change_listener": Case(
                lambda: own.register_queue_change_listener(TOPIC, lambda *change: None)
            ),
            "resume": Case(lambda: own.resume([Q0])),
            "seek": Case(lambda: own.seek(Q0, 0)),
            "seek_to_begin": Case(lambda: own.seek_to_begin(Q0)),
            "seek_to_end": Case(lambda: own.seek_to_end(queue)),
            "send_back": Case(lambda: consumer.send_back(self.message, delay_level=3)),
            "subscribe": Case(lambda: consumer.subscribe(TOPIC)),
            "unsubscribe": Case(lambda: self.new.unsubscribe(TOPIC), subscribe, self.close_new),
        }

    def receiving(self) -> dict[str, Case]:
        consumer = self.mq.simple_consumer("receiving", consume_from=raymq.ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET)
        self.admin.create_topic("leases", queues=1)
        consumer.subscribe("leases")
        consumer.receive(1, INVISIBLE_S, wait_s=0.0)

        def send() -> None:
            self.producer.send(Message("leases", self.name("leased").encode()))

        def receive(invisible_s: float = INVISIBLE_S * 5) -> list[Any]:
            until_s = time.monotonic() + WAIT_S
            while not (messages := consumer.receive(32, invisible_s, wait_s=1.0)):
                assert time.monotonic() < until_s, "a lease that nobody has does not expire"
            return list(messages)

        def lease() -> None:
            send()
            # Use a short lease. After an interrupt no caller has the handle with which the messages can be
            # acknowledged. They can be received again only after the lease has expired.
            self.new = receive(INVISIBLE_S)

        def settled() -> None:
            """Check that no message stays leased: messages that the interrupted call leased can be received again and
            acknowledged."""
            while self.lag("receiving", "leases"):
                consumer.ack(receive())

        def leave() -> None:
            self.new = self.mq.simple_consumer("leaving")
            self.new.subscribe(TOPIC)

        return {
            "ack": Case(lambda: consumer.ack(self.new), lease, lambda: (consumer.ack(self.new), settled())),
            "ack_handles": Case(
                lambda: consumer.ack_handles("leases", [one.handle for one in self.new]),
                lease,
                lambda: (consumer.ack(self.new), settled()),
            ),
            "change_invisible": Case(lambda: consumer.change_invisible(self.new, 0.0), lease, settled),
            "change_invisible_handles": Case(
                lambda: consumer.change_invisible_handles("leases", [one.handle for one in self.new], 0.0),
                lease,
                settled,
            ),
            "extend_invisible": Case(
                lambda: consumer.extend_invisible(self.new, 2 * INVISIBLE_S),
                lease,
                lambda: (consumer.ack(self.new), settled()),
            ),
            "extend_invisible_handles": Case(
                lambda: consumer.extend_invisible_handles("leases", [one.handle for one in self.new], 2 * INVISIBLE_S),
                lease,
                lambda: (consumer.ack(self.new), settled()),
            ),
            "close": Case(self.close_new, leave, self.close_new),
            "receive": Case(lambda: consumer.receive(32, INVISIBLE_S, wait_s=1.0), send, settled),
            "subscribe": Case(lambda: consumer.subscribe("leases")),
            "unsubscribe": Case(lambda: self.new.unsubscribe(TOPIC), leave, self.close_new),
        }

    def lag(self, group: str, topic: str) -> int:
        try:
            rows = self.admin.describe_group(group)
        except GroupNotExistError:
            return 0
        return sum(row.lag for row in rows if row.queue.topic == topic)

    def describing(self) -> dict[str, Case]:
        push = self.mq.push_consumer("describing")

        def client() -> None:
            self.new = raymq.connect()

        def start() -> object:
            return self.new.push_consumer("starting").subscribe(TOPIC).on_message(hear).start()

        def nothing_runs() -> None:
            """Close the client, and check that this also ends a consumer instance whose handle was lost because its
            start was interrupted."""
            self.new.close()
            eventually(lambda: not self.instances("starting"), "the end of what was started", WAIT_S)

        return {
            "hook": Case(lambda: push.hook(Hook())),
            "on_message": Case(lambda: push.on_message(hear)),
            "on_messages": Case(lambda: push.on_messages(hear)),  # type: ignore[arg-type]  # it is never called
            "start": Case(start, client, nothing_runs),
            "subscribe": Case(lambda: push.subscribe(TOPIC)),
        }

    def instances(self, group: str) -> list[str]:
        prefix = f"pull-{group}-"
        return [name for namespace, name in self.cluster.names() if namespace == INSTANCES and name.startswith(prefix)]

    def listening(self) -> dict[str, Case]:
        def start(group: str) -> Any:
            return self.mq.push_consumer(group).subscribe(TOPIC).on_message(hear).start()

        def ended() -> None:
            self.new.stop()
            eventually(lambda: not self.instances("ending"), "the end of the instance", WAIT_S)

        running = start("listening")
        return {
            "close": Case(self.close_new, self.make(lambda: start("ending")), ended),
            "pause": Case(lambda: running.pause([Q0])),
            "print_output": Case(running.print_output),
            "queues": Case(running.queues),
            "raise_listener_error": Case(running.raise_listener_error),
            "reply_statistics": Case(running.reply_statistics),
            "resume": Case(lambda: running.resume([Q0])),
            "status": Case(running.status),
            "stop": Case(self.on_new("stop"), self.make(lambda: start("ending")), ended),
            "suspend": Case(running.suspend, after=running.resume),
            "wait_loaded": Case(lambda: running.wait_loaded("hear", 10.0)),
            "wait_running": Case(lambda: running.wait_running(10.0)),
        }

    def tasks(self) -> dict[str, Case]:
        settings = task_settings({"queues": 1}, queue_name="tasks")
        connection = TaskConnection.open(settings)

        def send() -> None:
            task = Task(self.name("t"), "resize", (1,), {}, 5.0)
            state = StateRecord.of(task, TaskState.PENDING, 6.0)
            connection.send(task, state, deliver_at_ms=None, sharding_key=None)

        def tell() -> Future[Any]:
            state = StateRecord(self.name("t"), TaskState.STARTED, 6.0)
            return connection.tell(state, state.encode())

        def consuming() -> None:
            """Close the connection, and check that this also closes a consumer whose handle was lost because its
            creation was interrupted."""
            self.new.close()
            eventually(lambda: not self.new._client._open, "the end of the consumer", WAIT_S)

        def open_one() -> TaskConnection:
            return TaskConnection.open(settings)

        return {
            "close": Case(self.close_new, self.make(open_one), self.close_new),
            "consumer": Case(self.on_new("consumer"), self.make(open_one), consuming),
            "copy": Case(lambda: connection.copy(self.message, "changed", "no")),
            "history": Case(lambda: connection.history("t-unknown")),
            "send": Case(send),
            "summary": Case(connection.summary),
            "tell": Case(tell),
        }
