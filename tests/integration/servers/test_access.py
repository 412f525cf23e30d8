"""Tests of access control in a whole cluster: unknown users, wrong secrets, missing and granted rights, through each
API.

The APIs are the client, lanes (direct socket connections), actor handles and commands. The broker group has two
replicas, so that the tests also cover the servers' own calls and lanes. The test's own process runs as the super user.
Each other user has a separate actor, which acts like the user's program.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import ray

import raymq
from placement.inventory import running
from raymq.common.errors import AccessDeniedError, AuthenticationError
from raymq.common.names import CONSOLE, GATEWAY_PREFIX, NAMESPACE, WEBHOOK_GROUP
from raymq.gateway.convert.times import duration
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code
from raymq.remoting import actor_ref
from raymq.remoting.access.users import gateway_secret, make_user
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.broker_client import broker_client
from raymq.remoting.direct_requests import DirectTurn
from raymq.serve.states import StateRecord, TaskState
from raymq.serve.task_messages import state_message
from tests.support.clusters.access import (
    ADMIN,
    CALL_S,
    Program,
    access_cluster,
    all_own_kinds_run,
    as_user,
    consume_with_predicates,
    served,
)
from tests.support.clusters.cluster import Sandbox, kill_actors, user_environment
from tests.support.gateway.one_call import call_gateway, signed_headers
from tests.support.gateway.webhook_receiver import send_task, webhook_receiver
from tests.support.history.waiting import eventually

# Pickle this module by value, because Ray's workers cannot import test modules.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

TEAM, OTHER, ROME, PISA, SLOW = (
    raymq.Credentials(name, f"the secret of {name}") for name in ("orders-team", "other-team", "rome", "pisa", "slow")
)
READ_PER_S = 40
"""Quota of the user SLOW: the maximum number of messages that this user may consume per second."""
USERS = f"""
users:
  - name: {TEAM.user}
    secret: {TEAM.secret}
    policies:
      - {{resource: "Topic:orders", actions: [Pub, Sub]}}
      - {{resource: "Group:billing*", actions: [Sub]}}
      - {{resource: "Group:payments", actions: [Pub, Sub]}}
  - name: {OTHER.user}
    secret: {OTHER.secret}
    policies:
      - {{resource: "Topic:orders", actions: [Get]}}
  - name: {ROME.user}
    secret: {ROME.secret}
    policies:
      - {{resource: "Topic:rome%*", actions: [All]}}
      - {{resource: "Group:rome%*", actions: [All]}}
  - name: {PISA.user}
    secret: {PISA.secret}
    policies:
      - {{resource: "Topic:pisa%orders*", actions: [Pub]}}
      - {{resource: "Group:pisa%*", actions: [Sub]}}
  - name: {SLOW.user}
    secret: {SLOW.secret}
    consume_messages_per_second: {READ_PER_S}
    policies:
      - {{resource: "Topic:bulk", actions: [Pub, Sub]}}
      - {{resource: "Group:bulk*", actions: [Sub]}}
"""
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET


@pytest.fixture(scope="module")
def mq(box: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[raymq.Client]:
    """Run a cluster with access control. Yields the super user's client."""
    with access_cluster(box, tmp_path_factory.mktemp("access"), USERS) as client:
        client.admin.create_topic("orders", 2)
        client.admin.create_topic("bills", 2)
        yield client


def send(topic: str, body: bytes = b"x") -> Callable[[raymq.Client], Any]:
    def work(client: raymq.Client) -> Any:
        with client.producer() as producer:
            return producer.send(raymq.Message(topic, body)).message_id

    return work


def pull(topic: str, group: str) -> Callable[[raymq.Client], Any]:
    def work(client: raymq.Client) -> Any:
        with client.pull_consumer(group, consume_from=FIRST) as consumer:
            consumer.subscribe(topic)
            return [message.body for message in consumer.poll(timeout_s=60)]

    return work


def push(topic: str, group: str, notes: str) -> Callable[[raymq.Client], Any]:
    def listen(message: raymq.MessageExt) -> None:
        with open(notes, "ab") as file:
            file.write(message.body + b"\n")

    def work(client: raymq.Client) -> Any:
        consumer = client.push_consumer(group, consume_from=FIRST)
        with consumer.subscribe(topic).on_message(listen).start():
            until_s = time.monotonic() + 60
            while not os.path.exists(notes) and time.monotonic() < until_s:
                time.sleep(0.1)

    return work


def receive(topic: str, group: str) -> Callable[[raymq.Client], Any]:
    def work(client: raymq.Client) -> Any:
        with client.simple_consumer(group, consume_from=FIRST) as consumer:
            consumer.subscribe(topic)
            [message] = consumer.receive(wait_s=20)
            consumer.ack(message)
            return message.body

    return work


def test_a_user_with_rights_sends_and_consumes_over_each_api(mq: raymq.Client, tmp_path: Path) -> None:
    assert as_user(TEAM, send("orders", b"one"))
    assert as_user(TEAM, pull("orders", "billing-pull")) == [b"one"]
    assert as_user(TEAM, receive("orders", "billing-simple")) == b"one"
    as_user(TEAM, push("orders", "billing-push", str(tmp_path / "notes")))
    assert (tmp_path / "notes").read_bytes() == b"one\n"


def test_a_suggestion_names_only_topics_that_the_user_may_see(mq: raymq.Client) -> None:
    """An error for a missing topic suggests similar names. A user gets names from its own namespace, and the super user
    gets names of all topics without a namespace."""
    mq.admin.create_topic("pisa%orders", 1)
    mq.admin.create_topic("pisa%borders", 1)
    mq.admin.create_topic("oslo%orders", 1)

    def missing(client: raymq.Client) -> list[str]:
        texts = []
        for call in (
            lambda: client.admin.topic_route("pisa%orders2"),
            lambda: client.producer().send(raymq.Message("pisa%orders2", b"1")),
            lambda: client.admin.group_config("pisa%biling"),
        ):
            try:
                call()
            except (raymq.TopicNotExistError, raymq.GroupNotExistError) as error:
                texts.append(str(error))
        return texts

    texts = as_user(PISA, missing)
    assert ["did you mean 'pisa%orders'?" in text for text in texts] == [True, True, False]
    assert not [text for text in texts if "oslo" in text or "borders" in text]
    assert "pisa%borders" in " ".join(missing(mq))
    with pytest.raises(raymq.TopicNotExistError, match="did you mean 'bills'"):
        mq.admin.topic_route("bils")
    with pytest.raises(raymq.UserNotExistError, match="did you mean 'rome'"):
        mq.admin.user("roma")
    with pytest.raises(raymq.UserNotExistError, match="did you mean 'rome'"):
        mq.admin.delete_user("roma")
    for topic in ("pisa%orders", "pisa%borders", "oslo%orders"):
        mq.admin.delete_topic(topic)


def delayed(topic: str) -> Callable[[raymq.Client], Any]:
    def work(client: raymq.Client) -> Any:
        with client.producer() as producer:
            due_ms = time.time_ns() // 1_000_000 + 500
            soon = producer.send(raymq.Message(topic, b"soon", deliver_at_ms=due_ms))
            later = producer.send(raymq.Message(topic, b"later", deliver_at_ms=due_ms + 3_600_000))
            producer.recall(topic, later.recall_handle or "")
            return soon.message_id, later.message_id

    return work


def transacted(topic: str, group: str) -> Callable[[raymq.Client], Any]:
    def work(client: raymq.Client) -> Any:
        with client.transaction_producer(group, check=lambda message: None) as producer:
            with producer.transaction(raymq.Message(topic, b"paid")) as transaction:
                pass
            return transaction.message_id

    return work


def asked(topic: str, group: str) -> Callable[[raymq.Client], Any]:
    """Return a function that sends a request, which a listener of the same user answers. The function returns the
    reply."""

    def work(client: raymq.Client) -> Any:
        consumer = client.push_consumer(group).subscribe(topic).on_message(lambda message: raymq.reply(b"pong"))
        with consumer.start(), client.producer() as producer:
            return producer.request(raymq.Message(topic, b"ping"), timeout_s=60).body

    return work


def asked_directly(topic: str, group: str) -> Callable[[raymq.Client], Any]:
    """Return a function as `asked` does, for a request that is not stored."""

    def work(client: raymq.Client) -> Any:
        consumer = client.push_consumer(group, request_threads=1).subscribe(topic)
        with consumer.on_message(lambda message: raymq.reply(b"pong")).start(), client.producer() as producer:
            return producer.request(raymq.Message(topic, b"ping"), durable=False, timeout_s=60).body

    return work


def read_by_ray_data(topic: str) -> Callable[[raymq.Client], Any]:
    def work(client: raymq.Client) -> Any:
        from raymq.data import read_topic

        return read_topic(topic).count()

    return work


def test_a_user_with_rights_uses_delays_transactions_and_requests(mq: raymq.Client) -> None:
    soon, later = as_user(TEAM, delayed("orders"))
    paid = as_user(TEAM, transacted("orders", "payments"))
    assert as_user(TEAM, asked("orders", "billing-asked")) == b"pong"
    bodies = {one.message_id: one.body for one in mq.admin.query_by_id("orders", paid)}
    assert bodies == {paid: b"paid"}
    eventually(lambda: mq.admin.query_by_id("orders", soon), "the delayed message to come")
    with pytest.raises(AccessDeniedError, match="raymq_REPLY_TOPIC"):
        as_user(TEAM, lambda client: client.admin.pull(raymq.MessageQueue("raymq_REPLY_TOPIC", "broker-a", 0), 0))
    assert mq.admin.query_by_id("orders", later) == []


def test_requests_that_are_not_stored_need_the_rights_of_stored_ones(mq: raymq.Client) -> None:
    assert as_user(TEAM, asked_directly("orders", "billing-direct")) == b"pong"

    def ask(client: raymq.Client) -> Any:
        with client.producer() as producer:
            return producer.request(raymq.Message("orders", b"ping"), durable=False)

    def take(client: raymq.Client) -> Any:
        turn = DirectTurn("billing-direct", "pull-billing-direct-0", {"orders": ()}, 0)
        return broker_client("broker-a").call("take_requests", turn, timeout_s=CALL_S)

    for work, right in ((ask, "Pub on Topic:orders"), (take, "Sub on Group:billing-direct")):
        with pytest.raises(AccessDeniedError, match=right):
            as_user(OTHER, work)
    assert as_user(TEAM, take) is None


def test_a_trace_is_written_by_who_may_not_read_it(mq: raymq.Client) -> None:
    write = send("orders", b"traced")

    def work(client: raymq.Client) -> Any:
        with raymq.connect(trace=True) as traced:
            message_id = write(traced)
        try:
            client.admin.trace(message_id)
        except AccessDeniedError as error:
            return message_id, traced.trace_statistics().failed, str(error)

    message_id, failed, refusal = as_user(TEAM, work)
    assert (failed, "Topic:RMQ_SYS_TRACE_TOPIC" in refusal) == (0, True)
    assert [pub.topic for pub in mq.admin.trace(message_id).life.sends] == ["orders"]


def test_ray_data_reads_as_its_user(mq: raymq.Client) -> None:
    sent = sum(row.max_offset for row in mq.admin.describe_topic("orders"))
    assert as_user(TEAM, read_by_ray_data("orders")) == sent
    with pytest.raises(AccessDeniedError, match="Topic:bills"):
        as_user(TEAM, read_by_ray_data("bills"))


def test_spark_reads_and_writes_as_its_user(mq: raymq.Client) -> None:
    program = """
import raymq
from raydp_jobs import read_topic, spark_session, write_topic
from raymq.common.errors import AccessDeniedError

with raymq.connect() as mq, spark_session("access") as spark:
    rows = read_topic(spark, "orders", client=mq)
    print(rows.count())
    write_topic(rows.select("body").limit(3), "orders", client=mq)
    for work in (
        lambda: read_topic(spark, "bills", client=mq).count(),
        lambda: write_topic(rows.select("body"), "bills", client=mq),
    ):
        try:
            work()
        except AccessDeniedError as error:
            print("Topic:bills" in str(error))
"""
    sent = sum(row.max_offset for row in mq.admin.describe_topic("orders"))
    environment = {
        **user_environment(),
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "RAYMQ_USER": TEAM.user,
        "RAYMQ_SECRET": TEAM.secret,
    }
    done = subprocess.run(
        [sys.executable, "-"], input=program, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(sent), "True", "True"]
    assert sum(row.max_offset for row in mq.admin.describe_topic("orders")) == sent + 3


@pytest.mark.parametrize(
    ("work", "need"),
    [
        (send("bills"), "Topic:bills"),
        (pull("bills", "billing"), "Topic:bills"),
        (pull("orders", "shipping"), "Group:shipping"),
        (receive("orders", "shipping"), "Group:shipping"),
        (delayed("bills"), "Topic:bills"),
        (transacted("bills", "payments"), "Topic:bills"),
        (transacted("orders", "shipping"), "Group:shipping"),
        (asked("bills", "billing"), "Topic:bills"),
        (push("orders", "shipping", "/nowhere/notes"), "Group:shipping"),
        (lambda client: client.admin.create_topic("more", 1), "Create on Topic:more"),
        (lambda client: client.admin.delete_topic("orders"), "Delete on Topic:orders"),
    ],
    ids=["send", "pull", "pull-group", "receive", "delayed", "half", "end", "ask", "push", "create", "delete"],
)
def test_the_error_for_a_refused_user_names_the_missing_permission(
    mq: raymq.Client, work: Callable[[raymq.Client], Any], need: str
) -> None:
    with pytest.raises(AccessDeniedError, match=f"orders-team.*{need}"):
        as_user(TEAM, work)


@pytest.mark.parametrize(
    "credentials",
    [None, raymq.Credentials(TEAM.user, "another secret"), raymq.Credentials("stranger", "any secret")],
    ids=["nobody", "wrong-secret", "unknown"],
)
def test_an_unknown_user_is_refused_everything(mq: raymq.Client, credentials: raymq.Credentials | None) -> None:
    with pytest.raises(AuthenticationError):
        as_user(credentials, send("orders"))


def test_a_list_contains_only_names_that_the_user_may_see(mq: raymq.Client) -> None:
    def topics(client: raymq.Client) -> list[str]:
        return client.admin.list_topics()

    assert {"orders", "bills"} <= set(topics(mq))
    assert as_user(TEAM, topics) == ["orders"]
    assert as_user(OTHER, topics) == ["orders"]


def test_a_user_who_may_read_may_not_send(mq: raymq.Client) -> None:
    with pytest.raises(AccessDeniedError, match=r"other-team.*Pub on Topic:orders"):
        as_user(OTHER, send("orders"))


def test_a_user_of_a_namespace_can_access_only_the_namespace(mq: raymq.Client) -> None:
    works = [send("bills", b"Rome's"), pull("bills", "billing"), receive("bills", "simple-billing")]

    def at_home(client: raymq.Client) -> Any:
        with raymq.connect(namespace="rome") as rome:
            rome.admin.create_topic("bills", 1)
            done = [work(rome) for work in works]
            return done[1:], rome.admin.list_topics(), rome.admin.list_groups()

    def elsewhere(namespace: str) -> Callable[[raymq.Client], Any]:
        def work(client: raymq.Client) -> Any:
            with raymq.connect(namespace=namespace) as other:
                works[0](other)

        return work

    answer = as_user(ROME, at_home)
    assert answer == ([[b"Rome's"], b"Rome's"], ["bills"], ["billing", "simple-billing"])
    assert "rome%bills" in mq.admin.list_topics()
    for namespace, need in (("oslo", "Topic:oslo%bills"), ("", "Topic:bills")):
        with pytest.raises(AccessDeniedError, match=f"'rome'.* on {need}"):
            as_user(ROME, elsewhere(namespace))
    with pytest.raises(AccessDeniedError, match="Create on Topic:oslo%more"):
        as_user(ROME, lambda client: client.admin.create_topic("oslo%more", 1))


def pulled(topic: str, group: str, count: int) -> Callable[[raymq.Client], Any]:
    """Return a function that consumes `count` messages with a pull consumer. The function returns the seconds between
    its first and last poll."""

    def work(client: raymq.Client) -> Any:
        times, left = [], count
        with client.pull_consumer(group, consume_from=FIRST) as consumer:
            consumer.subscribe(topic)
            while left > 0:
                left -= len(consumer.poll(max_messages=left, timeout_s=60))
                times.append(time.monotonic())
        return times[-1] - times[0]

    return work


def received(topic: str, group: str, count: int) -> Callable[[raymq.Client], Any]:
    """Return a function that consumes `count` messages with a simple consumer. The function returns the seconds between
    its first and last receive."""

    def work(client: raymq.Client) -> Any:
        times, left = [], count
        with client.simple_consumer(group, consume_from=FIRST) as consumer:
            consumer.subscribe(topic)
            while left > 0:
                left -= consumer.ack(consumer.receive(max_messages=32, wait_s=60))
                times.append(time.monotonic())
        return times[-1] - times[0]

    return work


def listened(topic: str, group: str, count: int, notes: Path) -> Callable[[raymq.Client], Any]:
    """Return a function that consumes `count` messages with a listener. The function returns the seconds between the
    first and the last message."""

    def listen(message: raymq.MessageExt) -> None:
        with notes.open("a") as file:
            file.write(f"{time.monotonic()}\n")

    def work(client: raymq.Client) -> Any:
        def times() -> list[float]:
            return sorted(map(float, notes.read_text().split())) if notes.exists() else []

        consumer = client.push_consumer(group, consume_from=FIRST).subscribe(topic).on_message(listen)
        with consumer.start():
            until_s = time.monotonic() + CALL_S / 2
            while len(times()) < count and time.monotonic() < until_s:
                time.sleep(0.1)
        assert len(times()) >= count
        return times()[-1] - times()[0]

    return work


def test_the_consume_quota_applies_to_every_kind_of_consumer(mq: raymq.Client, tmp_path: Path) -> None:
    count = 4 * READ_PER_S
    mq.admin.create_topic("bulk", 1)
    with mq.producer() as producer:
        producer.send_batch([raymq.Message("bulk", b"x")] * count)
    # The test consumes four times as many messages as the quota allows per second. The quota of two seconds is
    # available at once, and the rest takes two more seconds. The first message may be timed late, so require only one
    # second.
    for work in (
        pulled("bulk", "bulk-pull", count),
        received("bulk", "bulk-simple", count),
        listened("bulk", "bulk-push", count, tmp_path / "notes"),
    ):
        assert as_user(SLOW, work) > 1.0
    mq.admin.update_user(SLOW.user, consume_messages_per_second=0)
    assert mq.admin.user(SLOW.user).consume_messages_per_second == 0


def test_an_actor_handle_accepts_a_signed_call_once(mq: raymq.Client) -> None:
    handle = ray.get_actor("broker-a", namespace=NAMESPACE)
    for reference in (handle.send.remote("orders", b"x"), handle.signed_groups.remote(None, b"")):
        with pytest.raises(AuthenticationError):
            actor_ref.resolve(reference, "a call", CALL_S)
    heard = actor_ref._signed(TEAM.identity, "broker-a", "groups", (), {})
    assert actor_ref.resolve(handle.signed_groups.remote(*heard), "groups", CALL_S) is not None
    with pytest.raises(AuthenticationError, match="repeat"):
        actor_ref.resolve(handle.signed_groups.remote(*heard), "groups", CALL_S)


def test_no_named_actor_of_a_running_cluster_serves_a_user_without_rights(mq: raymq.Client, tmp_path: Path) -> None:
    as_user(TEAM, send("orders", b"one"))
    stop = tmp_path / "stop"
    program = Program.remote(TEAM)
    reference = program.run.remote(consume_with_predicates("orders", "billing-named", stop))
    try:

        def all_run() -> bool:
            if ray.wait([reference], timeout=0)[0]:
                ray.get(reference)  # `ray.get` raises the error of a program that failed.
            return all_own_kinds_run()

        eventually(all_run, "an actor of each kind runs", 60.0)
        assert as_user(OTHER, served()) == []
    finally:
        stop.touch()
    assert ray.get(reference, timeout=CALL_S) > 0
    ray.kill(program)


def command(credentials: raymq.Credentials | None, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAYMQ_")}
    if credentials is not None:
        environment |= {"RAYMQ_USER": credentials.user, "RAYMQ_SECRET": credentials.secret}
    address = ray.get_runtime_context().gcs_address
    return subprocess.run(
        [str(Path(sys.executable).with_name("raymq")), *arguments],
        check=False,
        env={**environment, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=CALL_S,
    )


def test_a_command_is_its_users(mq: raymq.Client) -> None:
    listed = command(TEAM, "topic", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    assert "orders" in listed.stdout
    assert "bills" not in listed.stdout
    refused = command(TEAM, "topic", "delete", "orders", "--yes")
    assert refused.returncode != 0
    assert "Delete on Topic:orders" in refused.stderr
    nobody = command(None, "topic", "list")
    assert nobody.returncode != 0
    assert "RAYMQ_USER" in nobody.stderr


def test_status_shows_only_what_the_user_may_see(mq: raymq.Client) -> None:
    whole = command(ADMIN, "status", "--json")
    assert whole.returncode == 0, whole.stderr
    told = json.loads(whole.stdout)
    assert "bills" in str(told)
    assert [console["error"] for console in told["consoles"]] == [""]
    part = command(TEAM, "status", "--json")
    assert part.returncode == 0, part.stderr
    assert json.loads(part.stdout)["stores"] == []
    assert {"storage-broker-a-0", "storage-broker-a-1"} <= set(json.loads(part.stdout)["refused"])
    shown = command(TEAM, "status")
    assert "super users see more: " in shown.stdout
    assert "AccessDenied" not in shown.stdout
    assert "needs" not in shown.stdout
    nobody = command(None, "status")
    assert nobody.returncode == 1
    assert "RAYMQ_USER" in nobody.stderr
    assert "orders" in part.stdout
    assert "bills" not in part.stdout


def test_the_console_opens_to_the_super_users_secret_and_to_no_other(mq: raymq.Client) -> None:
    url = ActorRef(CONSOLE).call("describe", timeout_s=CALL_S)["url"]

    def status(secret: str | None) -> int:
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        try:
            with urlopen(Request(f"{url}api/v1/topics", headers=headers), timeout=CALL_S) as answer:
                return answer.status
        except HTTPError as error:
            return error.code

    assert [status(secret) for secret in (ADMIN.secret, TEAM.secret, None)] == [200, 403, 401]


def gateway_status() -> dict[str, Any]:
    """Return the status of the cluster's gateway."""
    [gateway] = [name for name in running() if name.startswith(GATEWAY_PREFIX)]
    status: dict[str, Any] = ActorRef(gateway).call("status", timeout_s=CALL_S)
    return status


def test_a_gateway_acts_for_the_user_who_signs_a_call(mq: raymq.Client) -> None:
    port = int(gateway_status()["listens"].rpartition(":")[2])

    def call(credentials: raymq.Credentials | None, method: str, request: Any) -> Any:
        if credentials is None:
            return call_gateway(port, method, request)
        secret = gateway_secret(make_user(credentials.user, credentials.secret).key)
        return call_gateway(port, method, request, signed_headers(credentials.user, secret))

    def route(credentials: raymq.Credentials | None, topic: str) -> int:
        request = wire.QueryRouteRequest(topic=wire.Resource(name=topic))
        return int(call(credentials, "QueryRoute", request).status.code)

    def sent(credentials: raymq.Credentials, topic: str) -> int:
        message_id = wire.SystemProperties(message_id=secrets.token_hex(17).upper())
        message = wire.Message(topic=wire.Resource(name=topic), body=b"by a gateway", system_properties=message_id)
        return int(call(credentials, "SendMessage", wire.SendMessageRequest(messages=[message])).status.code)

    wrong = raymq.Credentials(TEAM.user, "a wrong secret")
    assert [route(one, "orders") for one in (None, wrong)] == [Code.UNAUTHORIZED] * 2
    assert [route(OTHER, "orders"), sent(OTHER, "orders")] == [Code.OK, Code.FORBIDDEN]
    assert [sent(TEAM, "orders"), sent(TEAM, "bills")] == [Code.OK, Code.FORBIDDEN]
    receive = wire.ReceiveMessageRequest(
        group=wire.Resource(name="billing-gateway"),
        message_queue=wire.MessageQueue(topic=wire.Resource(name="orders")),
        batch_size=32,
        invisible_duration=duration(60_000),
        long_polling_timeout=duration(5_000),
    )
    bodies: set[bytes] = set()

    def received() -> bool:
        bodies.update(one.message.body for one in call(TEAM, "ReceiveMessage", receive))
        return b"by a gateway" in bodies

    eventually(received, "the message that the gateway stored")
    [refusal, *_] = call(OTHER, "ReceiveMessage", receive)
    assert refusal.status.code == Code.FORBIDDEN


def test_a_web_hook_needs_a_user_who_may_read_results(mq: raymq.Client) -> None:
    """The user of a replica ends the task. The gateway reads the end with rights of its own."""
    for queue in ("rome%jobs", "pisa%orders-jobs"):
        for topic in (queue, f"{queue}-results"):
            mq.admin.create_topic(topic, 1)
    http = gateway_status()["http"]

    def sent(user: raymq.Credentials, queue: str, **fields: str) -> tuple[int, Any]:
        secret = gateway_secret(make_user(user.user, user.secret).key)
        headers = {"authorization": f"Bearer {user.user}:{secret}", "x-mq-namespace": user.user}
        return send_task(http, queue, headers, name="resize", **fields)

    with webhook_receiver() as receiver:
        wrong = raymq.Credentials(ROME.user, "a wrong secret")
        assert sent(wrong, "jobs", webhook=receiver.url)[0] == 401
        # this user may only send to the queue and to its results
        assert sent(PISA, "orders-jobs")[0] == 202
        status, problem = sent(PISA, "orders-jobs", webhook=receiver.url)
        assert (status, "Topic:pisa%orders-jobs-results" in problem["detail"]) == (403, True)
        status, task = sent(ROME, "jobs", webhook=receiver.url)
        assert status == 202
        as_user(ROME, end_task("rome%jobs-results", task["id"]))
        [(_, data), *_] = eventually(lambda: receiver.of(task["id"]), "the call of the web hook", CALL_S)
        assert (data["state"], data["result"], data["queue"]) == ("SUCCESS", "done", "jobs")
        eventually(lambda: mq.admin.group_summary(WEBHOOK_GROUP).lag == 0, "the end of the delivery", CALL_S)
        # no other task was reported
        assert len(receiver.calls) == len(receiver.of(task["id"]))


def end_task(results: str, task: str) -> Callable[[raymq.Client], Any]:
    """Return a function that ends a task as a replica does. `results`: the stored name of the result topic."""

    def work(client: raymq.Client) -> Any:
        record = StateRecord(task, TaskState.SUCCESS, time.time(), time.time(), 0, "done", "replica-1")
        with client.producer() as producer:
            producer.send(state_message(results, record, record.encode()), sharding_key=task)

    return work


def test_the_checks_of_many_groups_need_a_right_on_each_group(mq: raymq.Client) -> None:
    def take(*groups: str) -> Callable[[raymq.Client], Any]:
        return lambda client: broker_client("broker-a").call("take_group_checks", groups, "c", timeout_s=CALL_S)

    assert as_user(TEAM, take("payments")) == []
    with pytest.raises(AccessDeniedError, match="Group:refunds"):
        as_user(TEAM, take("payments", "refunds"))


def test_a_wrong_secret_and_no_user_are_refused_at_the_connection(mq: raymq.Client) -> None:
    for credentials in (raymq.Credentials(TEAM.user, "a wrong secret"), None):
        with pytest.raises(AuthenticationError):
            as_user(credentials, lambda client: "connected")

    def work(client: raymq.Client) -> str:
        try:
            raymq.connect(credentials=raymq.Credentials(TEAM.user, "a wrong secret"))
        except raymq.ClientStateError as error:
            return str(error)
        return "connected"

    assert "acts as user 'orders-team' with another secret" in as_user(TEAM, work)


NEW = raymq.Credentials("new-team", "the secret of new-team")


def succeeds(credentials: raymq.Credentials, work: Callable[[raymq.Client], Any]) -> bool:
    """Run `work` as the user of `credentials`. Returns True if it succeeds, False if the servers refuse the
    user."""
    try:
        as_user(credentials, work)
    except (AccessDeniedError, AuthenticationError):
        return False
    return True


def test_users_and_policies_change_while_raymq_runs(mq: raymq.Client) -> None:
    mq.admin.create_user(NEW.user, NEW.secret)
    eventually(lambda: succeeds(NEW, lambda client: client.admin.list_topics()), "the user is known", CALL_S)
    assert not succeeds(NEW, send("orders"))
    created = command(ADMIN, "acl", "create", NEW.user, "--resource", "Topic:orders", "--action", "Pub", "--json")
    assert created.returncode == 0, created.stderr
    eventually(lambda: succeeds(NEW, send("orders")), "the policy is known", CALL_S)
    assert [entry.shown()["resource"] for entry in mq.admin.user(NEW.user).policies] == ["Topic:orders"]
    refused = command(NEW, "user", "list")
    assert refused.returncode == 1
    assert "new-team" in refused.stderr
    listed = command(ADMIN, "user", "list", "--json")
    assert [row["user"] for row in json.loads(listed.stdout)["users"]] == sorted(
        one.user for one in (ADMIN, TEAM, OTHER, ROME, PISA, SLOW, NEW)
    )
    with pytest.raises(raymq.InvalidArgumentError, match=r"raymq\.yaml"):
        mq.admin.delete_user(ADMIN.user)


def test_a_deleted_user_is_refused_on_open_connections(mq: raymq.Client, tmp_path: Path) -> None:
    gone = raymq.Credentials("short-lived", "the secret of short-lived")
    mq.admin.create_user(gone.user, gone.secret)
    mq.admin.create_policy(gone.user, "Topic:orders", ["Pub"])
    notes = tmp_path / "sent"

    def work(client: raymq.Client) -> str:
        with client.producer() as producer:
            until_s = time.monotonic() + CALL_S
            while time.monotonic() < until_s:
                try:
                    producer.send(raymq.Message("orders", b"x"))
                except AccessDeniedError as error:
                    return str(error)
                notes.touch()
                time.sleep(0.05)
        return "never refused"

    eventually(lambda: succeeds(gone, send("orders")), "the user is known", CALL_S)
    program = Program.remote(gone)
    reference = program.run.remote(work)
    eventually(notes.exists, "it has sent", CALL_S)
    mq.admin.delete_user(gone.user)
    assert "short-lived" in ray.get(reference, timeout=CALL_S)
    ray.kill(program)


def test_access_outlives_the_servers(mq: raymq.Client) -> None:
    """Users and their rights are still valid after the servers restart. This test is the last of the module, so that it
    also covers the changes that earlier tests made."""
    for actor in ("Storage", "Broker", "NameServer"):
        kill_actors(actor)

    def is_back() -> bool:
        try:
            return bool(as_user(TEAM, send("orders", b"two")))
        except AuthenticationError:
            raise
        except raymq.RaymqError:
            return False

    eventually(is_back, "sending goes on", CALL_S)
    eventually(lambda: succeeds(NEW, send("orders")), "the user that was created is there", CALL_S)
    with pytest.raises(AccessDeniedError):
        as_user(OTHER, send("orders"))
    with pytest.raises(AuthenticationError):
        as_user(None, send("orders"))
