"""Tests of bad input: it raises one clear error that tells the user what to do, before anything has changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

import raymq
from raymq.common.config.store import StoreSettings
from raymq.common.message import MessageExt, MessageQueue
from storage.message_store import MessageStore
from tests.support.cases import check_all
from tests.support.clusters.cluster import Sandbox, descendants, poll_until, user_environment
from tests.support.history.waiting import eventually
from tests.support.ports import free_port

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET


def state(mq: raymq.Client) -> tuple[object, ...]:
    """Return the cluster's state that bad input must not change: topics with the ends of their queues, and groups with
    their offsets."""
    topics = mq.admin.list_topics()
    groups = mq.admin.list_groups()
    return (
        [mq.admin.describe_topic(topic) for topic in topics],
        groups,
        [[(entry.queue, entry.committed) for entry in mq.admin.describe_group(group)] for group in groups],
    )


@pytest.fixture
def unchanged(mq: raymq.Client, topic: str) -> Iterator[None]:
    """Check at the end of the test that the cluster's state has not changed, and that a valid message is still
    accepted.

    The check takes about 2 s of processor time, because many modules share the cluster, and all their topics and groups
    are compared. So a test checks all its cases before it ends.
    """
    before = state(mq)
    yield
    assert state(mq) == before
    with mq.producer() as producer:
        assert producer.send(raymq.Message(topic, b"good")).queue_offset >= 0


# Tests of bad input for topics


@pytest.mark.usefixtures("unchanged")
def test_an_unknown_topic_is_named_with_how_to_create_it(mq: raymq.Client) -> None:
    def check(use: Callable[[], object]) -> None:
        with pytest.raises(
            raymq.TopicNotExistError, match="'nowhere' does not exist; create it: `raymq topic create nowhere`"
        ):
            use()

    message = raymq.Message("nowhere", b"1")
    uses: list[Callable[[], object]] = [
        lambda: mq.producer().send(message),
        lambda: mq.producer().send_async(message),
        lambda: mq.producer().send_oneway(message),
        lambda: mq.producer().send_batch([message]),
        lambda: mq.pull_consumer("g").subscribe("nowhere"),
        lambda: mq.push_consumer("g").subscribe("nowhere"),
        lambda: mq.admin.describe_topic("nowhere"),
        lambda: mq.admin.delete_topic("nowhere"),
        lambda: mq.admin.pull(MessageQueue("nowhere", "broker-a", 0), 0),
    ]
    check_all(uses, check)


@pytest.mark.usefixtures("unchanged")
def test_an_illegal_topic_name_is_refused_with_the_rule_it_breaks(mq: raymq.Client) -> None:
    def check(case: tuple[str, str]) -> None:
        name, rule = case
        with pytest.raises(raymq.IllegalNameError, match=rule):
            mq.admin.create_topic(name)
        with pytest.raises(raymq.IllegalNameError, match=rule), mq.producer() as producer:
            producer.send(raymq.Message(name, b"1"))

    cases = [
        ("", "the name is blank"),
        ("two words", "use letters, digits"),
        ("orders/eu", "use letters, digits"),
        ("été", "use letters, digits"),
        ("x" * 128, "at most 127"),
        ("rmq_sys_broker_state", "system topic"),
        ("TBW102", "system topic"),
    ]
    check_all(cases, check)


@pytest.mark.usefixtures("unchanged")
def test_an_illegal_group_name_is_refused_wherever_a_group_is_named(mq: raymq.Client, topic: str) -> None:
    broker = ray.get_actor("broker-a", namespace="raymq")

    def check(name: str) -> None:
        for use in (
            mq.producer,
            mq.pull_consumer,
            mq.push_consumer,
            mq.admin.describe_group,
            mq.admin.delete_group,
        ):
            with pytest.raises(raymq.IllegalNameError, match=r"group name .* is not legal"):
                use(name)
        with pytest.raises(ValueError, match=r"group name .* is not legal"):
            ray.get(broker.pull.remote(name, topic, queue_id=0, offset=0))

    check_all(["", "two words", "a@b", "x" * 121], check)


@pytest.mark.usefixtures("unchanged")
def test_an_impossible_number_of_queues_is_refused_with_the_rule(mq: raymq.Client) -> None:
    def check(queues: object) -> None:
        rule = "1 to 2048" if type(queues) is int else "a whole number"
        with pytest.raises(raymq.InvalidArgumentError, match=f"queues must be {rule}"):
            mq.admin.create_topic("never", queues=queues)  # type: ignore[arg-type]  # bad input on purpose

    check_all([0, -1, 2049, True, 2.5, "4"], check)


# Tests of bad input for messages


@pytest.mark.usefixtures("unchanged")
def test_an_illegal_body_is_refused_when_the_message_is_made(mq: raymq.Client, topic: str) -> None:
    broker = ray.get_actor("broker-a", namespace="raymq")

    def check(case: tuple[Any, str]) -> None:
        body, why = case
        with pytest.raises(raymq.MessageIllegalError, match=why):
            raymq.Message(topic, body)
        with pytest.raises(ValueError, match=why):
            ray.get(broker.send.remote(topic, body))

    cases = [
        (b"", "must not be empty"),
        ("text", "must be bytes, not str; encode it first"),
        (None, "must be bytes, not NoneType"),
    ]
    check_all(cases, check)


@pytest.mark.usefixtures("unchanged")
def test_a_batch_with_one_message_that_does_not_fit_a_record_stores_none_of_them(mq: raymq.Client, topic: str) -> None:
    too_long = raymq.Message(topic, b"1", properties={"essay": "x" * 40_000})
    good = raymq.Message(topic, b"2")
    with mq.producer() as producer:
        with pytest.raises(raymq.MessageIllegalError, match="max_message_size_bytes of 4194304: send a reference"):
            producer.send(raymq.Message(topic, bytes(4 * 1024 * 1024 + 1)))
        with pytest.raises(raymq.MessageIllegalError, match="32767"):
            producer.send(too_long)
        with pytest.raises(raymq.MessageIllegalError, match="32767"):
            producer.send_batch([good, too_long, good])
        with pytest.raises(raymq.MessageIllegalError, match="one topic"):
            producer.send_batch([good, raymq.Message("another", b"1")])
        with pytest.raises(raymq.MessageIllegalError, match="no messages"):
            producer.send_batch([])
        for item in (b"bytes", None):
            with pytest.raises(raymq.MessageIllegalError, match=r"expected a raymq\.Message"):
                producer.send_batch([good, item])  # type: ignore[list-item]  # bad input on purpose


@pytest.mark.usefixtures("unchanged")
def test_a_closed_producer_refuses_every_way_to_send(mq: raymq.Client, topic: str) -> None:
    producer = mq.producer()
    producer.close()
    message = raymq.Message(topic, b"1")
    for send in (producer.send, producer.send_async, producer.send_oneway, lambda one: producer.send_batch([one])):
        with pytest.raises(
            raymq.ClientStateError, match=r"producer is closed; create a new producer with client\.producer"
        ):
            send(message)


# Tests of bad input for consumers


@pytest.mark.usefixtures("unchanged")
def test_a_consumer_without_a_subscription_names_the_missing_call(mq: raymq.Client) -> None:
    with (
        mq.pull_consumer("g-none") as consumer,
        pytest.raises(raymq.ClientStateError, match=r"no subscription; call subscribe\(topic\) before poll"),
    ):
        consumer.poll()
    with pytest.raises(raymq.ClientStateError, match="this consumer is closed"):
        consumer.poll()
    push = mq.push_consumer("g-none").on_message(print)
    with pytest.raises(raymq.ClientStateError, match=r"no subscription; call subscribe\(topic\) before start"):
        push.start()


@pytest.mark.usefixtures("unchanged")
def test_a_push_consumer_without_a_listener_or_with_odd_numbers_is_refused(mq: raymq.Client, topic: str) -> None:
    push = mq.push_consumer("g-none").subscribe(topic)
    with pytest.raises(raymq.ClientStateError, match=r"no listener; call on_message"):
        push.start()
    for instances in (0, 257):
        with pytest.raises(raymq.InvalidArgumentError, match="instances must be 1 to 256"):
            push.on_message(print).start(instances=instances)
    with pytest.raises(raymq.InvalidArgumentError, match="batch_max must be 1 to 1024, not 0"):
        push.on_messages(print, batch_max=0).start()
    with pytest.raises(raymq.InvalidArgumentError, match="threads must be 1 to 1000"):
        mq.push_consumer("g-none", threads=0).subscribe(topic).on_message(print).start()


@pytest.mark.usefixtures("unchanged")
def test_a_subscription_that_names_no_tag_is_refused(mq: raymq.Client, topic: str) -> None:
    def check(expression: str) -> None:
        with pytest.raises(raymq.InvalidArgumentError, match="contains no tag; write "):
            mq.pull_consumer("g-none").subscribe(topic, expression)
        with pytest.raises(raymq.InvalidArgumentError, match="contains no tag"):
            mq.push_consumer("g-none").subscribe(topic, expression)

    check_all(["||", " || ", "   "], check)


def test_an_offset_out_of_range_is_refused_by_every_way_to_read(mq: raymq.Client, topic: str, group: str) -> None:
    with mq.producer() as producer:
        [queue] = {result.queue for result in producer.send_batch([raymq.Message(topic, b"1")] * 5)}
    broker = ray.get_actor(queue.broker_name, namespace="raymq")
    with mq.pull_consumer(group, consume_from=FIRST, auto_commit=False) as consumer:
        consumer.subscribe(topic)
        poll_until(consumer, 5)
        eventually(lambda: len(consumer.assignment()) == 4, "every queue is begun with, which commits its start")
        before = state(mq)
        for offset in (-1, 6, 2**40):
            for read in (
                lambda offset: consumer.seek(queue, offset),
                lambda offset: mq.admin.pull(queue, offset),
            ):
                with pytest.raises(raymq.OffsetOutOfRangeError, match=r"has offsets 0 to 5 .* seek to an"):
                    read(offset)
            with pytest.raises(ValueError, match=r"has offsets 0 to 5 .* seek to an"):
                ray.get(broker.pull.remote(group, topic, queue_id=queue.queue_id, offset=offset))
        assert consumer.position(queue) == 5
        assert state(mq) == before
        other = MessageQueue(topic, queue.broker_name, 99)
        with pytest.raises(raymq.ClientStateError, match=r":99 is not assigned to this consumer now; see assignment"):
            consumer.seek(other, 0)
    with pytest.raises(raymq.InvalidArgumentError, match=r"has queues 0 to 1 in broker group 'broker-.', not queue 99"):
        mq.admin.pull(other, 0)
    with pytest.raises(ValueError, match=r"has queues 0 to 1 in broker group 'broker-.', not queue 99"):
        ray.get(broker.pull.remote(group, topic, queue_id=99, offset=0))
    with pytest.raises(raymq.InvalidArgumentError, match="has no queue in broker group 'broker-z'"):
        mq.admin.pull(MessageQueue(topic, "broker-z", 0), 0)
    with pytest.raises(raymq.InvalidArgumentError, match="max_messages must be 1 to"):
        mq.admin.pull(queue, 0, max_messages=0)


def test_a_listeners_exception_is_shown_and_its_message_is_redelivered(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path
) -> None:
    tries, seen = tmp_path / "tries", tmp_path / "seen"
    tries.mkdir()
    seen.mkdir()

    def listen(message: MessageExt) -> None:
        attempt = len(os.listdir(tries))
        (tries / f"{attempt}").touch()
        while len(os.listdir(seen)) < attempt:  # Wait until the test has checked the error of the previous attempt.
            time.sleep(0.01)
        if attempt == 0:
            raise LookupError("no such customer")
        if attempt == 1:
            sys.exit("a listener should not do this")

    with mq.producer() as producer:
        producer.send(raymq.Message(topic, b"1"))
    push = mq.push_consumer(group, orderly=True, consume_from=FIRST).subscribe(topic).on_message(listen)
    with push.start() as subscription:
        eventually(lambda: subscription.status()[0].failures == 1, "the first failure")
        with pytest.raises(
            raymq.ListenerError, match=r"(?s)failed 1 time.* delivered again.*LookupError: no such cust"
        ):
            subscription.raise_listener_error()
        (seen / "first").touch()
        eventually(lambda: subscription.status()[0].failures == 2, "the second failure")
        with pytest.raises(raymq.ListenerError, match="SystemExit: a listener should not do this"):
            subscription.raise_listener_error()
        (seen / "second").touch()
        eventually(lambda: subscription.status()[0].consumed == 1, "the third delivery")
        subscription.raise_listener_error()
    assert len(os.listdir(tries)) == 3
    assert sum(entry.committed or 0 for entry in mq.admin.describe_group(group)) == 1


@pytest.mark.usefixtures("unchanged")
def test_a_listener_that_cannot_be_shipped_is_refused_before_anything_starts(mq: raymq.Client, topic: str) -> None:
    lock = threading.Lock()

    def holds_a_lock(message: MessageExt) -> None:
        with lock:
            print(message)

    def holds_the_client(message: MessageExt) -> None:
        mq.producer().send(raymq.Message(topic, message.body))

    push = mq.push_consumer("g-none").subscribe(topic)
    for listener in (holds_a_lock, holds_the_client):
        with pytest.raises(raymq.ListenerError, match=r"cannot be pickled .* create them in the listener's first call"):
            push.on_message(listener)
    with pytest.raises(raymq.ListenerError, match="must be callable"):
        push.on_message(b"not callable")  # type: ignore[arg-type]  # bad input on purpose


class BreaksWhenLoaded:
    """A message listener that can be pickled, but fails when it is unpickled."""

    def __call__(self, message: MessageExt) -> None:
        raise AssertionError("never called")

    def __reduce__(self) -> tuple[object, ...]:
        return (int, ("not a number",))


def test_a_listener_that_cannot_be_loaded_in_its_actor_is_refused_and_nothing_runs(
    mq: raymq.Client, topic: str
) -> None:
    before = state(mq)
    push = mq.push_consumer("g-none").subscribe(topic).on_message(BreaksWhenLoaded())
    with pytest.raises(
        raymq.ListenerError, match=r"(?s)the Listener actor cannot load listener .*invalid literal for int"
    ):
        push.start(instances=2)
    assert state(mq) == before
    names = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
    assert not any(name.startswith("pull-g-none") for name in names)


# Tests of bad input for starting and connecting


def start_elsewhere(directory: Path, *arguments: str, settings: str = "") -> tuple[int, str]:
    """Start an embedded raymq in a separate process that runs in `directory`. Returns the process's exit code and
    output."""
    directory.mkdir()
    if settings:
        (directory / "raymq.yaml").write_text(settings)
    program = (
        "import raymq, sys\n"
        "try:\n"
        f"    raymq.connect({', '.join(arguments)}).close()\n"
        "except raymq.RaymqError as error:\n"
        "    sys.exit(f'{type(error).__name__}: {error}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=directory, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stderr


def test_a_data_directory_in_use_is_refused_with_who_has_it_and_nothing_is_left_running(
    mq: raymq.Client, box: Sandbox, tmp_path: Path
) -> None:
    before = state(mq)
    holder = mq.storages.get("storage-broker-a-0").describe().pid
    code, errors = start_elsewhere(tmp_path / "work", "embedded=True", f"data_dir={str(box.data)!r}")
    assert code == 1
    assert errors.startswith("StoreLockedError: store directory")
    assert f"in use by the process with pid {holder}; stop raymq (`raymq down`), or use another directory" in errors
    assert state(mq) == before


IN_A_RAY_OF_THE_USERS = """
import json, sys
import ray, raymq

def attempt(**arguments):
    try:
        raymq.connect(**arguments).close()
        return "connected"
    except raymq.RaymqError as error:
        return f"{type(error).__name__}: {error}"

temp, locked, below_a_file, good = sys.argv[1:]
ray.init("local", num_cpus=1, include_dashboard=False, logging_level="error", _temp_dir=temp)
outcomes = {"no raymq": attempt()}
for name, data_dir in {"locked": locked, "below a file": below_a_file, "/proc": "/proc/raymq", "good": good}.items():
    outcomes[name] = attempt(embedded=True, data_dir=data_dir)
    assert ray.util.list_named_actors(all_namespaces=True) == [], name
assert ray.is_initialized()
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module")
def outcomes(box: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run a program with its own Ray that makes several mistakes when it connects. Returns the outcome of each mistake,
    by name."""
    place = tmp_path_factory.mktemp("elsewhere")
    (place / "file").write_text("in the way")
    settings = StoreSettings(
        store_path_root_dir=place / "locked" / "broker-a-0", mapped_file_size_commit_log_bytes=65536
    )
    store = MessageStore.open(settings, broker_name="broker-a")
    arguments = [str(box.tmp / "ray"), str(place / "locked"), str(place / "file" / "data"), str(place / "good")]
    try:
        done = subprocess.run(
            [sys.executable, "-c", IN_A_RAY_OF_THE_USERS, *arguments],
            cwd=place,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    finally:
        store.close()
    shutil.rmtree(box.tmp / "ray", ignore_errors=True)
    assert done.returncode == 0, done.stderr
    assert (place / "file").read_text() == "in the way"
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_connecting_where_ray_runs_without_raymq_says_how_to_start_it(outcomes: dict[str, str]) -> None:
    assert outcomes["no raymq"].startswith(
        "ClusterNotFoundError: this Ray cluster does not run raymq: start it with `raymq up`"
    )


def test_a_data_directory_locked_by_a_plain_store_names_its_process(outcomes: dict[str, str]) -> None:
    assert outcomes["locked"].startswith("StoreLockedError: store directory")
    assert f"in use by the process with pid {os.getpid()}" in outcomes["locked"]


@pytest.mark.parametrize("place", ["below a file", "/proc"])
def test_the_error_for_an_unwritable_data_directory_has_a_remedy(outcomes: dict[str, str], place: str) -> None:
    """If the data directory is not writable, the error says what to check. The test uses paths to which nobody can
    write, because root may write almost everywhere."""
    assert outcomes[place].startswith("StoreError: cannot open the store director")
    assert "check that the disk has free space" in outcomes[place]
    assert "may write to" in outcomes[place]


def test_after_refused_starts_a_good_one_succeeds_in_the_same_ray(outcomes: dict[str, str]) -> None:
    assert outcomes["good"] == "connected"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("broker_gruops: 2\n", "raymq.yaml: unknown key 'broker_gruops'; did you mean 'broker_groups'?"),
        ("store: {flush_disc_type: SYNC_FLUSH}\n", "'store.flush_disc_type'; did you mean 'flush_disk_type'?"),
        ("colour: red\n", "unknown key 'colour'; the keys are cluster_name, data_dir"),
        ("broker_groups: 27\n", "broker_groups: Input should be less than or equal to 26, got 27"),
        ("- a list\n", "must be a mapping of settings, not a list"),
        ("broker_groups: [\n", "is not YAML"),
    ],
)
def test_settings_that_are_not_understood_are_refused_before_anything_starts(
    settings: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raymq.yaml").write_text(settings)
    monkeypatch.chdir(tmp_path)
    children = set(descendants())
    with pytest.raises(raymq.ConfigError) as refused:
        raymq.connect(embedded=True)
    assert problem in str(refused.value)
    assert set(descendants()) <= children
    assert [path.name for path in tmp_path.iterdir()] == ["raymq.yaml"]


def test_arguments_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        raymq.ClientStateError, match="pass embedded=True, or leave config, data_dir and broker_groups out"
    ):
        raymq.connect(data_dir=tmp_path)
    with pytest.raises(raymq.ClientStateError, match="leave out address or embedded"):
        raymq.connect("127.0.0.1:6379", embedded=True)
    with pytest.raises(raymq.ConfigError, match=r"cannot read settings from .*nowhere.yaml: No such file"):
        raymq.connect(embedded=True, config=tmp_path / "nowhere.yaml")


def test_an_embedded_raymq_where_one_runs_already_is_refused_and_leaves_it_alone(
    mq: raymq.Client, topic: str, tmp_path: Path
) -> None:
    with pytest.raises(raymq.ClientStateError, match=r"already runs raymq.*raymq\.connect\(\)"):
        raymq.connect(embedded=True, data_dir=tmp_path / "data")
    assert not (tmp_path / "data").exists()
    with mq.producer() as producer:
        producer.send(raymq.Message(topic, b"still here"))


def test_connecting_to_an_unused_address_fails_at_once(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    code, errors = start_elsewhere(tmp_path / "work", repr(address))
    assert code == 1
    assert errors.startswith(f"ClusterNotFoundError: no Ray cluster runs at {address} (Connection refused)")
    assert "name another Ray cluster with --address or RAY_ADDRESS" in errors


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("nonsense", "write the address as host:port"),
        ("127.0.0.1:port", "write the address as host:port"),
        ("127.0.0.1:99999", ""),
        ("no-such-host.invalid:6379", ""),
    ],
)
def test_connecting_to_an_invalid_address_fails(address: str, problem: str, tmp_path: Path) -> None:
    code, errors = start_elsewhere(tmp_path / "work", repr(address))
    assert code == 1
    assert errors.startswith(f"ClusterNotFoundError: no Ray cluster runs at {address}")
    assert problem in errors
    assert "name another Ray cluster with --address or RAY_ADDRESS" in errors


def test_a_ray_error_of_another_kind_is_not_hidden(mq: raymq.Client, topic: str) -> None:
    broker = ray.get_actor("broker-a", namespace="raymq")
    with pytest.raises((TypeError, RayTaskError)):
        ray.get(broker.send.remote(topic, b"1", colour="red"))


AFTER_RAYS_SHUTDOWN = """
import json, sys
import ray, raymq

topic = sys.argv[1]
mq = raymq.connect()
producer = mq.producer("before")
simple = mq.simple_consumer(f"{topic}-simple")
simple.subscribe(topic)
push = mq.push_consumer(f"{topic}-push").subscribe(topic).on_message(lambda message: None).start()
ray.shutdown()
calls = {
    "send": lambda: producer.send(raymq.Message(topic, b"after"), timeout_s=1),
    "first send": lambda: mq.producer("after").send(raymq.Message(topic, b"after"), timeout_s=1),
    "topics": mq.admin.list_topics,
    "receive": lambda: simple.receive(max_messages=1),
    "stop": push.stop,
}
outcomes = {}
for name, call in calls.items():
    try:
        call()
    except raymq.RaymqError as error:
        outcomes[name] = str(error)
    assert not ray.is_initialized(), name
for item in (simple, producer, mq):
    item.close()
    assert not ray.is_initialized(), item
print(json.dumps(outcomes))
"""


def test_a_client_that_is_used_after_ray_was_shut_down_starts_no_other_ray(mq: raymq.Client, topic: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AFTER_RAYS_SHUTDOWN, topic],
        env={**user_environment(), "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert set(outcomes) == {"send", "first send", "topics", "receive", "stop"}
    for name, problem in outcomes.items():
        assert "no longer connected to Ray: close clients before ray.shutdown()" in problem, name
