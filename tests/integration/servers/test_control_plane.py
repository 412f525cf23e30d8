"""Tests of NameServers and brokers without message traffic: the state they keep, the requests they refuse, and the
information they return.

The cluster has two NameServers and two broker groups. Sending to a topic creates the topic, and failed messages are
retried soon.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import ray
from click.testing import CliRunner

import raymq
from raymq.client.admin.upkeep.metadata import GroupMetadata, Metadata, TopicMetadata
from raymq.client.consumer.group_offsets import GroupOffsets
from raymq.common.errors import GroupNotExistError, NoPermissionError, RaymqError, TopicNotExistError
from raymq.common.message import MessageQueue
from raymq.common.names import NAMESPACE
from raymq.common.protocol.clients import ConsumerData
from raymq.common.protocol.group import GroupConfig, OffsetCommit, QueueOffset, StartOffsetQuery
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.common.retry import persist_until
from raymq.records.format.decode import decode_records
from raymq.tools.cli import cli
from tests.support.clusters.cluster import SERVER_SETTINGS, Sandbox, kill_actors
from tests.support.history.waiting import eventually
from tests.support.stores.stores import make_batch

SETTINGS = SERVER_SETTINGS
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
FROM_FIRST = StartOffsetQuery(FIRST)
WAIT_S = 60.0


def broker(name: str):
    return ray.get_actor(name, namespace=NAMESPACE)


def run(*words: str) -> str:
    """Run a command and check that it succeeds. Returns its standard output."""
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def queue_of(topic: str) -> MessageQueue:
    return MessageQueue(topic, "broker-a", 0)


def put(mq: raymq.Client, topic: str, *bodies: bytes) -> None:
    """Store one message for each body in queue 0 of broker-a."""
    storage = mq.storages.get("storage-broker-a-0")
    persist_until(time.monotonic() + WAIT_S, lambda left_s: storage.append([make_batch(bodies, topic=topic)], left_s))


def fetch(mq: raymq.Client, topic: str, offset: int = 0, wait_s: float = 0.0) -> FetchResult:
    storage = mq.storages.get("storage-broker-a-0")
    [result] = storage.fetch([FetchRequest(topic, 0, offset, 100)], 1 << 20, wait_s, 10.0)
    return result


# Tests of NameServers


def test_the_kv_configuration_and_order_topics_outlive_the_nameservers(
    mq: raymq.Client, topic: str, box: Sandbox
) -> None:
    """The KV configuration and the order topics survive a restart of all NameServers. One of them restarts without its
    file, as it would on another node."""
    mq.admin.put_kv("mine", "k", "v")
    mq.admin.set_order_config(topic, "broker-a:2")
    shutil.rmtree(box.data / "nameserver-1")
    kill_actors("NameServer")

    def back() -> bool:
        try:
            kept = mq.routes.call_all("list_kv", "mine")
            known = mq.routes.call_all("brokers")  # Each NameServer gets a broker's heartbeat at a different time.
            return kept == [{"k": "v"}, {}] and [len(brokers) for brokers in known] == [2, 2]
        except RaymqError:
            return False

    eventually(back, "the KV configuration and the brokers", WAIT_S)
    assert mq.admin.list_kv("mine") == {"k": "v"}
    assert mq.admin.order_config(topic) == "broker-a:2"
    assert mq.routes.call_all("list_kv", "ORDER_TOPIC_CONFIG") == [{topic: "broker-a:2"}] * 2
    assert {len(route.publish_queues) for route in mq.routes.call_all("topic_route", topic)} == {2}
    assert len(mq.admin.topic_route(topic).subscribe_queues) == 4
    assert ray.get(broker("broker-a").topic_config.remote(topic)).order
    with pytest.raises(raymq.InvalidArgumentError, match="set_order_config"):
        mq.admin.put_kv("ORDER_TOPIC_CONFIG", topic, "broker-a:1")
    mq.admin.set_order_config(topic, None)
    assert mq.admin.order_config(topic) is None
    assert len(mq.admin.topic_route(topic).publish_queues) == 4
    mq.admin.delete_kv("mine", "k")
    assert mq.admin.list_kv("mine") == {}
    eventually(lambda: knows_that_there_is_none(mq, "nothing"), "the NameServers to be sure", WAIT_S)


def knows_that_there_is_none(mq: raymq.Client, topic: str) -> bool:
    """Return True if the NameServers report that the topic does not exist. After a restart they report this only when
    every broker has had time to register."""
    try:
        mq.routes.get(topic)
    except RaymqError as error:
        return isinstance(error, TopicNotExistError)
    return False


def test_writes_can_be_taken_off_a_broker(mq: raymq.Client, topic: str) -> None:
    assert mq.admin.wipe_write_perm("broker-a") > 0
    assert {queue.broker_name for queue in mq.admin.topic_route(topic).publish_queues} == {"broker-b"}
    mq.admin.add_write_perm("broker-a")
    assert {queue.broker_name for queue in mq.admin.topic_route(topic).publish_queues} == {"broker-a", "broker-b"}


def test_routes_name_the_node_of_each_store(mq: raymq.Client, topic: str) -> None:
    assert mq.admin.clusters() == {"raymq": ["broker-a", "broker-b"]}
    assert {data.nodes[0] for data in mq.admin.topic_route(topic).brokers.values()} == {mq.node_id}


# Tests of topics


def test_a_topic_is_read_and_written_as_its_permission_says(mq: raymq.Client, topic: str) -> None:
    mq.admin.update_topic(topic, perm=4)
    # A remote call through a plain Ray actor handle raises only Python's built-in exceptions. Here it raises
    # RuntimeError instead of NoPermissionError.
    with pytest.raises(RuntimeError, match="no W"):
        ray.get(broker("broker-a").send.remote(topic, b"x"))
    with pytest.raises(NoPermissionError):
        mq.routes.get_or_create(topic)
    mq.admin.update_topic(topic, perm=2)
    ray.get(broker("broker-a").send.remote(topic, b"x"))
    with pytest.raises(RuntimeError, match="no R"):
        ray.get(broker("broker-a").pull.remote("g", topic, queue_id=0, offset=0))
    assert mq.admin.topic_route(topic).subscribe_queues == ()
    with pytest.raises(NoPermissionError):
        mq.admin.update_topic(topic, perm=8)


def test_a_topic_gets_more_queues_and_never_fewer(mq: raymq.Client, topic: str) -> None:
    mq.admin.update_topic(topic, queues=7)
    assert len(mq.admin.topic_route(topic).publish_queues) == 7
    with pytest.raises(raymq.InvalidArgumentError):
        mq.admin.update_topic(topic, queues=6)


def test_many_topics_and_groups_are_created_with_few_calls(mq: raymq.Client) -> None:
    topics = {f"many-{index}": 1 + index % 5 for index in range(600)}
    mq.admin.create_topics(topics)
    for servers_topics in mq.routes.call_all("topics"):  # `create_topics` has sent the topics to every NameServer.
        assert topics.keys() <= set(servers_topics)
    mq.routes.fetch(topics)
    assert {topic: len(mq.routes.get(topic).publish_queues) for topic in topics} == topics
    mq.admin.create_topics({**topics, "many-more": 2})
    assert len(mq.admin.topic_route("many-more").publish_queues) == 2
    with pytest.raises(raymq.TopicExistsError):
        mq.admin.create_topics({"many-none": 2, "many-0": 7})
    groups = [GroupConfig(f"many-{index}", retry_max_times=3) for index in range(600)]
    mq.admin.create_groups(groups)
    assert {config.group for config in groups} <= set(mq.admin.list_groups())
    assert mq.admin.group_config("many-599").retry_max_times == 3
    kill_actors("Broker")
    assert {config.group for config in groups} <= set(mq.admin.list_groups())


def test_the_starts_of_many_queues_are_committed_at_once(mq: raymq.Client, topic: str, group: str) -> None:
    put(mq, topic, b"a", b"b")
    offsets, queues = GroupOffsets(group), mq.admin.topic_route(topic).subscribe_queues
    for broker_name in ("broker-a", "broker-b"):
        offsets.ensure_group(broker_name)
    wanted = {**dict.fromkeys(queues, 1), MessageQueue("nothing", "broker-a", 0): 1}
    assert offsets.start_offsets(wanted, FROM_FIRST) == dict.fromkeys(queues, QueueOffset(0))
    assert [offsets.committed_offset(queue) for queue in queues] == [0] * len(queues)


def test_a_topic_is_created_by_who_sends_to_it(mq: raymq.Client) -> None:
    assert len(mq.routes.get_or_create("made-by-sending").publish_queues) == 8
    assert len(mq.routes.get_or_create("made-by-sending-2", 1).publish_queues) == 2
    ray.get(broker("broker-a").send.remote("made-by-sending-3", b"x"))
    assert len(mq.admin.topic_route("made-by-sending-3").publish_queues) == 4
    assert "TBW102" not in mq.admin.list_topics()
    with pytest.raises(raymq.IllegalNameError):
        mq.routes.get_or_create("rmq_sys_x")


def test_a_deleted_topic_takes_no_messages_until_it_is_created_again(mq: raymq.Client, topic: str) -> None:
    storage = mq.storages.get("storage-broker-a-0")
    put(mq, topic, b"old")
    mq.admin.delete_topic(topic)
    with pytest.raises(TopicNotExistError):
        storage.append([make_batch([b"late"], topic=topic)], 10.0)
    kill_actors("Storage")
    with pytest.raises(TopicNotExistError):
        put(mq, topic, b"late")
    mq.admin.create_topic(topic, queues=4)
    assert [queue.messages for queue in mq.admin.describe_topic(topic)] == [0, 0, 0, 0]
    put(mq, topic, b"new")
    assert [message.body for message in decode_records(fetch(mq, topic).records)] == [b"new"]


# Tests of a broker's consumer groups and their committed offsets


def test_offsets_count_by_owner_and_reset_and_outlive_the_broker(mq: raymq.Client, topic: str, group: str) -> None:
    offsets, queue = GroupOffsets(group), queue_of(topic)
    put(mq, topic, *[b"x"] * 100)
    offsets.ensure_group("broker-a")
    assert offsets.start_offset(queue, FROM_FIRST, 1) == QueueOffset(0, 0)
    assert not offsets.commit_offsets({queue: OffsetCommit(50, 1, 0)}).fenced
    offsets.commit_offsets({queue: OffsetCommit(40, 1, 0)})
    assert offsets.committed_offset(queue) == 50
    offsets.start_offset(queue, FROM_FIRST, 2)
    assert offsets.commit_offsets({queue: OffsetCommit(60, 1, 0)}).fenced == {queue}
    assert mq.admin.reset_offsets(group, topic, offset=10, queue=queue) == {queue: 10}
    kill_actors("Broker")
    reset = {queue: QueueOffset(10, 1)}
    assert offsets.commit_offsets({queue: OffsetCommit(70, 2, 0)}, WAIT_S).reset == reset
    assert offsets.commit_offsets({queue: OffsetCommit(None, 2, 0)}).reset == reset
    assert offsets.start_offset(queue, FROM_FIRST, 2) == reset[queue]
    offsets.commit_offsets(
        {queue: OffsetCommit(11, 2, 1), MessageQueue("nothing", "broker-a", 0): OffsetCommit(1, 2, 0)}
    )
    assert offsets.committed_offset(queue) == 11


def test_offsets_are_reset_to_either_end_and_to_a_time(mq: raymq.Client, topic: str, group: str) -> None:
    queue = queue_of(topic)
    put(mq, topic, b"a", b"b")
    time.sleep(0.05)
    middle_ms = time.time_ns() // 1_000_000
    time.sleep(0.05)
    put(mq, topic, b"c")
    with pytest.raises(GroupNotExistError):
        mq.admin.reset_offsets(group, topic, "latest")
    GroupOffsets(group).ensure_group("broker-a")
    assert mq.admin.reset_offsets(group, topic, "latest")[queue] == 3
    assert mq.admin.reset_offsets(group, topic, timestamp_ms=middle_ms)[queue] == 2
    assert mq.admin.reset_offsets(group, topic, "earliest")[queue] == 0
    with pytest.raises(raymq.OffsetOutOfRangeError):
        mq.admin.reset_offsets(group, topic, offset=4, queue=queue)
    with pytest.raises(raymq.InvalidArgumentError):
        mq.admin.reset_offsets(group, topic)
    mq.admin.reset_offsets(group, topic, offset=2, queue=queue)
    assert mq.admin.clone_offsets(group, group + "-2", topic)[queue] == 2
    assert GroupOffsets(group + "-2").committed_offset(queue) == 2
    assert mq.admin.delete_offsets(group + "-2", topic)[queue] == 2
    assert GroupOffsets(group + "-2").committed_offset(queue) is None
    assert mq.admin.delete_offsets(group + "-2", topic) == {}


def test_topics_groups_and_offsets_are_exported_and_brought_back(
    mq: raymq.Client, topic: str, group: str, tmp_path: Path
) -> None:
    queue = queue_of(topic)
    put(mq, topic, b"a", b"b", b"c")
    mq.admin.update_topic(topic, perm=4)
    mq.admin.create_group(GroupConfig(group, retry_max_times=3))
    mq.admin.reset_offsets(group, topic, offset=2, queue=queue)
    mq.admin.create_topic(f"{topic}-fifo", 3, message_type="FIFO")
    mq.admin.forbid(group, f"{topic}-fifo")
    file = tmp_path / "cluster.json"
    run("export", str(file), "--topics", f"{topic}*", "--groups", group)
    exported = mq.admin.export_metadata(topics=f"{topic}*", groups=group)
    assert Metadata.from_json(file.read_text()) == exported
    assert exported.topics.keys() == {topic, f"{topic}-fifo"}
    assert exported.offsets == {group: {topic: {"broker-a": {0: 2}}}}
    assert {step.action for step in mq.admin.import_metadata(exported)} == {"same"}

    mq.admin.delete_group(group)
    mq.admin.delete_topic(f"{topic}-fifo")
    mq.admin.update_topic(topic, perm=6)
    dry = json.loads(run("import", str(file), "--dry-run", "--json"))
    assert dry["dry_run"]
    assert group not in mq.admin.list_groups()
    done = {(step.kind, step.name): step.action for step in mq.admin.import_metadata(exported)}
    assert done == {
        ("topic", topic): "changed: perm",
        ("topic", f"{topic}-fifo"): "created with 3 queues",
        ("group", group): "created",
        ("offsets", f"{group} in {topic}"): "1 of 1 set",
    }
    assert [(step["kind"], step["name"]) for step in dry["steps"]] == list(done)
    assert mq.admin.export_metadata(topics=f"{topic}*", groups=group) == exported


def test_an_import_reports_impossible_entries_and_applies_the_rest(mq: raymq.Client, topic: str, group: str) -> None:
    put(mq, topic, b"a")
    metadata = Metadata(
        {
            topic: TopicMetadata({"broker-a": 2, "broker-b": 2}, attributes={"cleanup.policy": "COMPACTION"}),
            f"{topic}-far": TopicMetadata({"broker-x": 3, "broker-y": 2}),
        },
        {group: GroupMetadata(GroupConfig(group, retry_max_times=5000))},
        {f"{group}-new": {topic: {"broker-a": {0: 1, 1: 7}, "broker-x": {0: 1}}, "unknown": {"broker-a": {0: 1}}}},
    )
    steps = {step.name: step for step in mq.admin.import_metadata(metadata)}
    assert [step.failed for step in steps.values()] == [True, False, True, False, True]
    assert "another cleanup.policy" in steps[topic].action
    assert steps[f"{topic}-far"].action == "created with 5 queues"
    assert mq.admin.topic_route(f"{topic}-far").queue_counts() == {"broker-a": 3, "broker-b": 2}
    assert "retry_max_times" in steps[group].action
    assert (
        steps[f"{group}-new in {topic}"].action
        == "1 of 3 set; 2 left out, because the queues here do not contain these offsets"
    )
    assert GroupOffsets(f"{group}-new").committed_offset(queue_of(topic)) == 1
    with pytest.raises(raymq.InvalidArgumentError, match="no part 'users'"):
        mq.admin.import_metadata(metadata, parts=["users"])  # type: ignore[list-item]  # the point


def test_lag_is_reported_in_messages_and_in_time(mq: raymq.Client, topic: str, group: str) -> None:
    offsets, queue = GroupOffsets(group), queue_of(topic)
    put(mq, topic, b"a", b"b")
    offsets.ensure_group("broker-a")
    offsets.start_offset(queue, FROM_FIRST, 1)
    time.sleep(0.2)
    [entry] = [entry for entry in mq.admin.describe_group(group) if entry.queue == queue]
    assert entry.lag == 2
    assert 200 <= entry.lag_ms < 60_000
    offsets.commit_offsets({queue: OffsetCommit(2, 1, 0)})
    summary = mq.admin.group_summary(group)
    assert (summary.lag, summary.lag_ms, summary.retry_lag, summary.dead_letters) == (0, 0, 0, 0)


def test_a_disabled_group_stops_and_keeps_its_committed_offsets(mq: raymq.Client, topic: str, group: str) -> None:
    offsets, queue = GroupOffsets(group), queue_of(topic)
    put(mq, topic, b"a", b"b")
    offsets.ensure_group("broker-a")
    offsets.start_offset(queue, FROM_FIRST, 1)
    assert mq.admin.update_group(group, consume_enable=False) == mq.admin.group_config(group)
    assert "consume_enable" in offsets.commit_offsets({queue: OffsetCommit(1, 1, 0)}).stopped[queue]
    assert offsets.committed_offset(queue) == 1
    with pytest.raises(NoPermissionError, match="consume_enable"):
        offsets.start_offset(queue, FROM_FIRST, 2)
    with pytest.raises(RuntimeError, match="consume_enable"):
        ray.get(broker("broker-a").pull.remote(group, topic, queue_id=0, offset=0))
    mq.admin.update_group(group, consume_enable=True)
    assert offsets.start_offset(queue, FROM_FIRST, 2).queue_offset == 1
    mq.admin.delete_group(group)
    with pytest.raises(GroupNotExistError):
        mq.admin.group_config(group)
    assert f"%RETRY%{group}" not in mq.admin.list_topics(internal=True)


def test_a_returned_message_is_redelivered_and_becomes_a_dead_letter(mq: raymq.Client, topic: str, group: str) -> None:
    offsets, handle = GroupOffsets(group), broker("broker-a")
    put(mq, topic, b"poison")
    offsets.ensure_group("broker-a")
    records = fetch(mq, topic).records
    [first] = decode_records(records)
    answer = ray.get(handle.send_back.remote(group, records, max_reconsume_times=1))
    assert (answer.retried, answer.dead) == (1, 0)
    again = fetch(mq, f"%RETRY%{group}", wait_s=30.0)
    [second] = decode_records(again.records)
    assert (second.message_id, second.body, second.reconsume_times) == (first.message_id, b"poison", 1)
    assert second.system_properties["RETRY_TOPIC"] == topic
    answer = ray.get(handle.send_back.remote(group, again.records, max_reconsume_times=1))
    assert (answer.retried, answer.dead) == (0, 1)
    [dead] = decode_records(fetch(mq, f"%DLQ%{group}").records)
    assert (dead.message_id, dead.reconsume_times) == (first.message_id, 2)
    summary = mq.admin.group_summary(group)
    assert (summary.dead_letters, summary.retry_lag) == (1, 1)
    with pytest.raises(raymq.InvalidArgumentError):
        ray.get(handle.send_back.remote(group, b"nonsense" * 20))


# Tests of connected clients and of counters


def test_the_brokers_know_who_produces_and_consumes(mq: raymq.Client, topic: str, group: str) -> None:
    consumer = object()
    data = ConsumerData(group, "PULL", {topic: "paid"})
    with mq.producer("registry-producer"):
        mq.heartbeats.set_consumer(consumer, data)
        eventually(lambda: len(mq.admin.producer_connections("registry-producer")) == 1, "the producer", WAIT_S)
        eventually(lambda: len(mq.admin.consumer_connections(group)) == 1, "the consumer", WAIT_S)
        [connection] = mq.admin.consumer_connections(group)
        assert (connection.client_id, connection.consumer) == (mq.heartbeats.client_id, data)
        assert group in mq.admin.list_groups()
    mq.heartbeats.remove(consumer)
    eventually(lambda: mq.admin.producer_connections("registry-producer") == [], "nobody", WAIT_S)
    eventually(lambda: mq.admin.consumer_connections(group) == [], "nobody", WAIT_S)


def test_puts_and_gets_are_counted(mq: raymq.Client, topic: str, group: str) -> None:
    offsets, queue = GroupOffsets(group), queue_of(topic)
    put(mq, topic, *[b"x"] * 30)
    offsets.ensure_group("broker-a")
    offsets.start_offset(queue, FROM_FIRST, 1)
    offsets.commit_offsets({queue: OffsetCommit(20, 1, 0)})
    assert mq.admin.group_stats(group)[topic].messages.total == 20
    eventually(lambda: mq.admin.topic_stats(topic).messages.total == 30, "the puts", WAIT_S)
    assert mq.admin.topic_stats(topic).bytes.total > 30
