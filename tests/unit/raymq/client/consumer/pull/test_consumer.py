"""Tests of the blocking and the asyncio pull consumer, with a simulated group, simulated brokers and a real
store."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import threading
from types import SimpleNamespace

import pyarrow as pa
import pytest

from raymq.client.consumer import fetcher, send_back
from raymq.client.consumer.assignment import offset_committer
from raymq.client.consumer.pull import engine as pull_engine, settings as pull_settings
from raymq.client.consumer.pull.engine import PullEngine
from raymq.client.consumer.pull.settings import PullSettings
from raymq.common.errors import (
    BodyUnreadableError,
    ClientStateError,
    DataLossError,
    GroupNotExistError,
    IllegalNameError,
    InvalidArgumentError,
    NoPermissionError,
    OffsetOutOfRangeError,
    ServiceNotAvailableError,
)
from raymq.common.message import ConsumeFromWhere, MessageExt, MessageQueue
from raymq.common.numbers import LONGEST_TIME_S, NUMBER_MAX
from raymq.common.protocol.clients import ConsumerData
from raymq.common.protocol.group import OffsetCommit
from raymq.common.protocol.membership import AllocateStrategy
from raymq.records.kernels.columns import SCHEMA
from tests.support.clients.fakes import WAIT_S, FakeRoutes, topic_route
from tests.support.clients.members import QuickClient
from tests.support.clients.twins import KINDS, LoopThread, make_twin
from tests.support.clients.watches import MappedStorage
from tests.support.group_sim.pull_group import Group
from tests.support.history.waiting import eventually
from tests.support.stores.stores import make_batch, open_store

Q0, Q1, OTHER = MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1), MessageQueue("other", "a", 0)
AWAY = ServiceNotAvailableError("restarting")


@pytest.fixture
def group(monkeypatch):
    group = Group()
    monkeypatch.setattr(pull_engine, "GroupOffsets", lambda name: group)

    monkeypatch.setattr(offset_committer, "RESET_QUERY_INTERVAL_S", 0.02)
    monkeypatch.setattr(fetcher, "FETCH_LONG_POLL_S", 0.02)
    short = {name: one._replace(low=0.0) for name, one in pull_settings.RANGES.items() if name.endswith("_s")}
    monkeypatch.setattr(pull_settings, "RANGES", pull_settings.RANGES | short)
    return group


@pytest.fixture
def store(tmp_path, no_flushes):
    store = open_store(tmp_path / "store")
    store.append([make_batch([b"%d" % number for number in range(5)])])
    yield store
    store.close()


@pytest.fixture
def routes():
    return FakeRoutes(topic_route(a=2), topic_route("other", a=1))


@pytest.fixture
def loop():
    loop = LoopThread()
    yield loop
    loop.stop()


@pytest.fixture(params=["here", "elsewhere"])
def storage(request, store):
    """Yield the client of a storage actor on the consumers' node or on another node, depending on the test's
    parameter."""
    storage = MappedStorage(store)
    if request.param == "elsewhere":
        storage.reader = lambda: None
    return storage


@pytest.fixture(params=KINDS)
def consume(request, group, storage, routes, loop, commits):
    """Return a function that makes blocking or asyncio consumers, depending on the test's parameter. The consumers
    subscribe to `orders`, or to nothing if `expression` is None."""
    consumers = []

    def consume(*, expression: str | None = "*", on_close=lambda engine: None, **options):
        engine = PullEngine(
            PullSettings.of("billing", **{"auto_commit_interval_s": 0.0, **options}),
            routes=routes,
            storages=SimpleNamespace(get=lambda name: storage),
            rebalance=QuickClient(group.heartbeat),
            commits=commits,
            node_id="node-1",
            announce=lambda engine, data: group.announced.append(data),
            on_close=on_close,
        )
        consumers.append(make_twin(request.param, engine, loop))
        consumers[-1].engine = engine
        if expression is not None:
            consumers[-1].subscribe("orders", expression)
        return consumers[-1]

    yield consume
    group.commit_failure = None
    for consumer in consumers:
        consumer.close()


def poll(consumer, count: int = 1, max_messages: int = 500) -> list[bytes]:
    """Poll until `count` messages have arrived. Returns their bodies."""
    bodies: list[bytes] = []
    while len(bodies) < count:
        messages = consumer.poll(max_messages, timeout_s=WAIT_S)
        assert messages, f"only {bodies} came"
        bodies += [message.body for message in messages]
    return bodies


def holds(consumer, *queues: MessageQueue) -> None:
    eventually(lambda: consumer.assignment() == sorted(queues), f"{queues} are held", WAIT_S)


# Tests of polling messages


def test_messages_come_in_the_order_of_their_queue_and_as_many_as_asked_for(consume, store):
    consumer = consume()
    assert poll(consumer, 5, max_messages=2) == [b"0", b"1", b"2", b"3", b"4"]
    assert consumer.position(Q0) == 5
    holds(consumer, Q0, Q1)
    store.append([make_batch([b"5"])])
    assert poll(consumer) == [b"5"]


def test_the_greatest_numbers_are_obeyed_and_absurd_ones_change_nothing(consume, store):
    consumer = consume()
    for arguments in ((0,), (2**63,), (1.0,), (1, -1), (1, math.nan), (1, 10**18)):
        for call in (consumer.poll, consumer.poll_table):
            with pytest.raises(InvalidArgumentError, match="must be"):
                call(*arguments)
    assert poll(consumer, 5, max_messages=NUMBER_MAX) == [b"0", b"1", b"2", b"3", b"4"]
    for offset in (-NUMBER_MAX, -1, 6, NUMBER_MAX):
        with pytest.raises(OffsetOutOfRangeError, match="has offsets 0 to 5"):
            consumer.seek(Q0, offset)
        with pytest.raises(InvalidArgumentError):
            consumer.commit({Q0: offset})
    with pytest.raises(InvalidArgumentError, match="queue_id must be a whole number"):
        consumer.commit({MessageQueue("orders", "a", 0.0): 5})
    assert consumer.offset_for_timestamp(Q0, NUMBER_MAX) == 5
    store.append([make_batch([b"5"])])
    assert [message.body for message in consumer.poll(1, LONGEST_TIME_S)] == [b"5"]
    assert consumer.commit()[Q0] == 6


def test_the_queues_of_a_topic_are_read_together(consume, store):
    store.append([make_batch([b"a", b"b"], queue_id=1)])
    assert sorted(poll(consume(), 7)) == [b"0", b"1", b"2", b"3", b"4", b"a", b"b"]


def test_only_messages_with_a_wanted_tag_come_and_the_position_passes_the_others(consume, store):
    store.append([make_batch([b"collides"], tags="BBBB"), make_batch([b"wanted"], tags="AaAa"), make_batch([b"none"])])
    consumer = consume(expression="AaAa")
    assert poll(consumer) == [b"wanted"]
    assert consumer.poll(timeout_s=0.0) == []
    eventually(lambda: consumer.position(Q0) == 8, "passing the others", WAIT_S)


def test_without_messages_poll_returns_an_empty_list_in_time(consume, group):
    group.granted = {Q1}
    consumer = consume()
    holds(consumer, Q1)
    assert consumer.poll(timeout_s=0.0) == []
    assert consumer.poll(timeout_s=0.05) == []


def test_a_table_has_the_same_messages_as_columns(consume, group, store):
    store.append([make_batch([b"collides"], tags="BBBB"), make_batch([b"wanted"], tags="AaAa")])
    consumer = consume()
    table = consumer.poll_table(max_messages=4, timeout_s=WAIT_S)
    assert table.schema.names == SCHEMA.names
    assert table.schema.field("body").type == pa.binary_view()
    assert table.column("body").to_pylist() == [b"0", b"1", b"2", b"3"]
    assert consumer.position(Q0) == 4
    table = consumer.poll_table(timeout_s=WAIT_S, body_type="binary")
    assert table.column("queue_offset").to_pylist() == [4, 5, 6]
    assert table.schema.field("body").type == pa.binary()
    assert consumer.commit()[Q0] == 7
    assert consumer.poll_table(timeout_s=0.0).num_rows == 0
    group.committed_offsets.clear()
    filtered = consume(expression="AaAa")
    assert filtered.poll_table(timeout_s=WAIT_S).column("tags").to_pylist() == ["AaAa"]


def test_iteration_gives_message_after_message_and_leaving_it_skips_none(consume, group):
    consumer = consume()
    bodies = []
    for message in consumer:
        bodies.append(message.body)
        if len(bodies) == 2:
            break
    assert poll(consumer, 3) == [b"2", b"3", b"4"]
    group.has(q0=2)


def test_iteration_ends_when_the_consumer_is_closed(consume):
    consumer = consume()
    bodies = []
    for message in consumer:
        bodies.append(message.body)
        if len(bodies) == 5:
            consumer.close()
    assert bodies == [b"0", b"1", b"2", b"3", b"4"]


def test_a_poll_that_waits_ends_when_the_consumer_is_closed(consume, group):
    group.granted = set()
    consumer = consume()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(consumer.poll(timeout_s=3600.0)))
    thread.start()
    eventually(lambda: consumer.engine._core._polling, "the poll", WAIT_S)
    consumer.close()
    thread.join(WAIT_S)
    assert answers == [[]]


def test_a_second_poll_at_the_same_time_is_refused(consume, group):
    group.granted = set()
    consumer = consume()
    thread = threading.Thread(target=lambda: consumer.poll(timeout_s=3600.0))
    thread.start()
    eventually(lambda: consumer.engine._core._polling, "the poll", WAIT_S)
    with pytest.raises(ClientStateError, match="another thread or task"):
        consumer.poll()
    consumer.close()
    thread.join(WAIT_S)


@pytest.mark.parametrize("storage", ["elsewhere"], indirect=True)
def test_a_damaged_message_is_handed_over_in_its_place(consume, store, monkeypatch):
    fetch = store.fetch

    def damaged(requests, **arguments):
        results = fetch(requests, **arguments)
        return [dataclasses.replace(result, records=result.records.replace(b"222", b"XXX")) for result in results]

    monkeypatch.setattr(store, "fetch", damaged)
    store.append([make_batch([b"22222222", b"the last"])])
    consumer = consume(auto_commit=False)
    found: list[MessageExt] = []
    while len(found) < 7:
        found += consumer.poll(timeout_s=WAIT_S)
    with pytest.raises(BodyUnreadableError, match=r"offset 5 of queue orders@a:0 "):
        _ = found[5].body
    assert [message.body for message in found if message.body_error is None] == [
        b"0",
        b"1",
        b"2",
        b"3",
        b"4",
        b"the last",
    ]
    assert consumer.position(Q0) == 7


def test_a_loss_is_raised_after_earlier_messages_and_other_queues_continue(consume, store, tmp_path, monkeypatch):
    """The messages before a lost range are returned before the error, while other queues continue. The test truncates
    an old log file of the running store."""
    monkeypatch.setattr(fetcher, "LOSS_PAUSE_S", 0.01, raising=False)
    store.append([make_batch([b"%d" % number + b"." * 1000 for number in range(5, 105)])])
    log = tmp_path / "store" / "commitlog" / f"{0:020d}"
    whole = log.read_bytes()
    os.truncate(log, 30_000)
    consumer = consume()
    bodies: list[bytes] = []

    def read_all() -> None:
        while True:
            bodies.extend(poll(consumer, 1))

    with pytest.raises(DataLossError, match=r"the message at offset \d+ of queue orders@a:0 cannot be read.*seek"):
        read_all()
    first_lost = len(bodies)
    assert [int(body.rstrip(b".")) for body in bodies] == list(range(first_lost))
    assert 10 < first_lost < 50
    with pytest.raises(DataLossError, match=f"offset {first_lost} "):
        read_all()
    store.append([make_batch([b"other"], queue_id=1)])

    def others() -> list[bytes]:
        try:
            return [message.body for message in consumer.poll(timeout_s=0.0)]
        except DataLossError:
            return []

    assert eventually(others, "the other queue's message", WAIT_S) == [b"other"]
    consumer.seek(Q0, 100)
    assert poll(consumer, 5) == [b"%d" % number + b"." * 1000 for number in range(100, 105)]
    log.write_bytes(whole)
    consumer.seek(Q0, first_lost)
    assert len(poll(consumer, 105 - first_lost)) == 105 - first_lost


# Tests of committing offsets


def test_polled_messages_are_committed_at_the_next_poll(consume, group):
    consumer = consume()
    assert poll(consumer, 2, max_messages=2) == [b"0", b"1"]
    for _ in range(5):
        group.hears(Q0, Q1)
    assert group.committed_offsets.get(Q0, 0) == 0
    poll(consumer, 1, max_messages=1)
    group.has(q0=2)


def test_automatic_commits_keep_their_interval(consume, group):
    consumer = consume(auto_commit_interval_s=3600.0)
    poll(consumer, 5, max_messages=1)
    for _ in range(5):
        group.hears(Q0, Q1)
    assert group.commits == []
    assert consumer.commit()[Q0] == 5


def test_without_auto_commit_only_commit_commits(consume, group):
    consumer = consume(auto_commit=False)
    poll(consumer, 5, max_messages=1)
    assert group.commits == []
    assert consumer.commit() == {Q0: 5}
    assert consumer.committed(Q0) == 5
    assert consumer.commit() == {}
    assert len(group.commits) == 1


def test_offsets_may_be_committed_one_by_one(consume, group):
    consumer = consume(auto_commit=False)
    poll(consumer, 5)
    assert consumer.commit({Q0: 2}) == {Q0: 2}
    assert consumer.committed(Q0) == 2
    with pytest.raises(InvalidArgumentError, match="polls have only reached offset 5"):
        consumer.commit({Q0: 6})
    assert consumer.commit({Q0: 1}) == {}
    assert group.committed_offsets[Q0] == 2


def test_a_failed_commit_raises_and_can_be_repeated(consume, group):
    consumer = consume(auto_commit=False)
    poll(consumer, 5)
    group.commit_failure = AWAY
    with pytest.raises(ServiceNotAvailableError):
        consumer.commit()
    group.commit_failure = None
    assert consumer.commit() == {Q0: 5}


def test_an_auto_commit_that_fails_for_now_does_not_disturb_polling(consume, group):
    consumer = consume()
    poll(consumer, 1, max_messages=1)
    group.commit_failure = AWAY
    assert poll(consumer, 2, max_messages=1) == [b"1", b"2"]
    group.commit_failure = None
    poll(consumer, 1, max_messages=1)
    group.has(q0=3)


def test_poll_raises_the_error_of_a_refused_auto_commit(consume, group):
    consumer = consume()
    poll(consumer, 1, max_messages=1)
    group.commit_failure = GroupNotExistError("billing")
    poll(consumer, 1, max_messages=1)
    eventually(lambda: consumer.engine._committer.refusal, "the refusal", WAIT_S)
    with pytest.raises(GroupNotExistError):
        consumer.poll()


# Tests of a consumer's membership in its group


def test_heartbeats_have_the_strategy_and_the_node(consume, group):
    consume(allocate_strategy=AllocateStrategy.STICKY)
    group.hears(Q0, Q1)
    beat = group.heartbeats[-1]
    assert beat.allocation.strategy is AllocateStrategy.STICKY
    assert beat.node == "node-1"
    assert beat.topics == {"orders"}


def test_queues_start_at_the_configured_offsets_in_their_generation(consume, group):
    consumer = consume(consume_from=ConsumeFromWhere.CONSUME_FROM_TIMESTAMP, consume_timestamp_ms=1_700_000_000_077)
    holds(consumer, Q0, Q1)
    assert {(queue, query.timestamp_ms, generation) for queue, query, generation in group.starts} == {
        (Q0, 1_700_000_000_077, 1),
        (Q1, 1_700_000_000_077, 1),
    }


def test_a_revoked_queue_is_held_until_the_next_poll_and_committed_before_it_is_let_go(consume, group):
    consumer = consume()
    poll(consumer, 2, max_messages=2)
    group.grant(Q1)
    holds(consumer, Q1)
    group.hears(Q0, Q1)
    assert consumer.poll(timeout_s=0.0) == []  # the poll no longer returns messages of the revoked queue
    group.hears(Q1)
    assert group.committed_offsets[Q0] == 2
    group.grant(Q0, Q1)
    assert poll(consumer, 3) == [b"2", b"3", b"4"]


def test_a_revoked_queue_is_let_go_while_a_poll_waits(consume, group):
    consumer = consume()
    poll(consumer, 5)
    thread = threading.Thread(target=lambda: consumer.poll(timeout_s=3600.0))
    thread.start()
    group.grant(Q1)
    group.hears(Q1)
    assert group.committed_offsets[Q0] == 5
    consumer.close()
    thread.join(WAIT_S)


def test_a_revoked_queue_is_not_let_go_while_its_offset_cannot_be_committed(consume, group):
    consumer = consume()
    poll(consumer, 2, max_messages=2)
    group.commit_failure = AWAY
    group.grant(Q1)
    holds(consumer, Q1)
    consumer.poll(timeout_s=0.0)
    group.hears(Q0, Q1)
    group.commit_failure = None
    group.hears(Q1)
    assert group.committed_offsets[Q0] == 2


def test_without_auto_commit_a_commit_lets_a_revoked_queue_go(consume, group):
    consumer = consume(auto_commit=False)
    poll(consumer, 2, max_messages=2)
    group.grant(Q1)
    holds(consumer, Q1)
    assert consumer.commit() == {Q0: 2}
    group.hears(Q1)


def test_a_member_its_group_has_not_answered_for_too_long_returns_and_commits_nothing(consume, group):
    consumer = consume(auto_commit_interval_s=3600.0)
    poll(consumer, 2, max_messages=2)
    group.failure, count = AWAY, len(group.heartbeats)
    eventually(lambda: len(group.heartbeats) > count + 1, "heartbeats that fail", WAIT_S)
    consumer.engine._core._lease_until_s = 0.0
    assert consumer.poll(timeout_s=0.0) == []
    assert consumer.assignment() == []
    assert consumer.commit() == {}
    assert group.commits == []
    group.failure = None
    assert poll(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_queue_that_another_member_has_begun_with_is_let_go(consume, group):
    consumer = consume(auto_commit=False)
    poll(consumer, 2, max_messages=2)
    group.fenced = frozenset({Q0})
    assert consumer.commit() == {}
    holds(consumer, Q1)
    group.fenced = frozenset()
    group.grant(Q0, Q1)
    holds(consumer, Q0, Q1)


@pytest.mark.parametrize("wait_s", [0.0, WAIT_S])
def test_a_poll_raises_at_once_while_its_group_may_read_nothing(consume, group, wait_s):
    consumer = consume()
    assert poll(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]
    group.stopped = dict.fromkeys((Q0, Q1), "forbidden to read")
    # `raymq group forbid` increases the number of the group's offset resets. The members then request the committed
    # offsets of their queues again.
    group.resets += 1
    eventually(lambda: consumer.engine._core.all_forbidden, "the end of reading", WAIT_S)
    raised = []
    for _ in range(2):
        with pytest.raises(NoPermissionError, match="forbidden to read") as caught:
            consumer.poll(timeout_s=wait_s)
        raised.append(caught.value)
    assert raised[0] is not raised[1], "the callers would share one traceback"
    info = consumer.engine.running_info("c", "h", stacks=False)
    assert (info.trouble, {queue.state for queue in info.queues}) == ("forbidden to read", {"forbidden"})
    group.stopped = {}
    group.resets += 1
    eventually(lambda: not consumer.engine._core.forbidden, "the permission", WAIT_S)
    assert consumer.poll(timeout_s=0.0) == []


def test_a_poll_that_waits_is_ended_by_the_end_of_reading(consume, group):
    consumer = consume()
    poll(consumer, 5)
    raised = []

    def wait() -> None:
        with pytest.raises(NoPermissionError) as caught:
            consumer.poll(timeout_s=WAIT_S)
        raised.append(caught.value)

    thread = threading.Thread(target=wait)
    thread.start()
    group.stopped = dict.fromkeys((Q0, Q1), "no")
    group.resets += 1
    thread.join(WAIT_S)
    assert len(raised) == 1


def test_a_poll_raises_when_it_finds_nothing_and_its_group_may_not_read_one_of_its_queues(consume, group):
    group.stopped = {Q1: "no"}
    consumer = consume()
    eventually(lambda: Q1 in consumer.engine._core.forbidden, "the refusal", WAIT_S)
    assert poll(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]
    with pytest.raises(NoPermissionError, match="no"):
        consumer.poll(timeout_s=0.0)


def test_a_queue_that_was_assigned_by_hand_comes_back_after_it_was_forbidden(consume, group, monkeypatch):
    monkeypatch.setattr(offset_committer, "FORBIDDEN_INTERVAL_S", 0.02)
    consumer = consume(expression=None)
    consumer.assign([Q0])
    assert poll(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]
    group.stopped = {Q0: "no"}
    eventually(lambda: consumer.engine._core.all_forbidden, "the end of reading", WAIT_S)
    group.stopped = {}
    eventually(lambda: not consumer.engine._core.forbidden, "the permission", WAIT_S)
    assert (consumer.assignment(), consumer.poll(timeout_s=0.0)) == ([Q0], [])


def test_a_reset_while_the_program_is_idle_is_followed(consume, group):
    consumer = consume(auto_commit=False)
    poll(consumer, 5)
    assert consumer.commit() == {Q0: 5}
    group.reset_to(Q0, 3)
    assert poll(consumer, 2) == [b"3", b"4"]
    assert consumer.commit() == {Q0: 5}


def test_a_reset_is_applied_after_a_failed_commit(consume, group):
    consumer = consume(auto_commit=False)
    poll(consumer, 5)
    group.commit_failure = AWAY
    group.reset_to(Q0, 4)
    group.hears(Q0, Q1)
    group.hears(Q0, Q1)
    group.commit_failure = None
    assert poll(consumer) == [b"4"]


def test_poll_raises_the_error_of_a_group_that_cannot_be_joined(consume, group):
    group.failure = AWAY
    consumer = consume()
    eventually(lambda: len(group.heartbeats) > 1, "heartbeats that fail", WAIT_S)
    with pytest.raises(ServiceNotAvailableError, match="restarting"):
        consumer.poll(timeout_s=0.05)
    group.failure = None
    assert poll(consumer, 5)


def test_a_queue_whose_start_is_not_known_yet_is_taken_later(consume, group):
    group.start_failures = [AWAY, AWAY, AWAY]
    assert poll(consume(), 5) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_program_that_does_not_poll_leaves_its_group_and_comes_back(consume, group):
    consumer = consume(poll_interval_max_s=0.2)
    poll(consumer, 2, max_messages=2)
    eventually(lambda: group.heartbeats[-1].leaving, "leaving", WAIT_S)
    assert consumer.assignment() == []
    # The second consumer gets all messages again, because nothing was committed.
    assert poll(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]


# Tests of subscriptions, and of queues that the program chooses


def test_an_unsubscribed_topic_is_returned_no_more(consume, group, store):
    store.append([make_batch([b"x"], topic="other")])
    group.granted = {Q0, OTHER}
    consumer = consume()
    consumer.subscribe("other")
    assert len(poll(consumer, 6)) == 6
    consumer.unsubscribe("other")
    holds(consumer, Q0)
    consumer.poll(timeout_s=0.0)
    group.hears(Q0)
    assert group.committed_offsets[OTHER] == 1
    assert group.heartbeats[-1].topics == {"orders"}
    assert [set(data.subscriptions) for data in group.announced] == [{"orders"}, {"orders", "other"}, {"orders"}]
    for topic in ("other", "nothing"):
        with pytest.raises(ClientStateError, match="does not subscribe"):
            consumer.unsubscribe(topic)


def test_assigned_queues_are_read_without_a_group_and_committed_under_its_name(consume, group):
    consumer = consume(expression=None)
    consumer.assign([Q0])
    assert consumer.assignment() == [Q0]
    assert consumer.position(Q0) == 0
    assert poll(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]
    assert consumer.commit() == {Q0: 5}
    assert group.commits[-1][Q0].generation == 0
    [announced] = group.announced
    assert announced == ConsumerData("billing", "PULL", {"orders": "*"}, member=announced.member)
    assert group.heartbeats == []


def test_assigned_queues_are_filtered_by_tag(consume, store):
    store.append([make_batch([b"no"], tags="TagB"), make_batch([b"yes"], tags="TagA")])
    store.append([make_batch([b"x"], topic="other", tags="TagB")])
    consumer = consume(expression=None)
    consumer.assign([Q0], "TagA")
    assert poll(consumer) == [b"yes"]
    consumer = consume(expression=None)
    consumer.assign([Q0, OTHER], {"orders": "TagA"})
    assert sorted(poll(consumer, 2)) == [b"x", b"yes"]


def test_a_second_assign_replaces_the_first_and_commits_returned_messages(consume, group, store):
    store.append([make_batch([b"a"], queue_id=1)])
    consumer = consume(expression=None)
    consumer.assign([Q0])
    poll(consumer, 2, max_messages=2)
    consumer.assign([Q1])
    assert group.committed_offsets[Q0] == 2
    assert consumer.assignment() == [Q1]
    assert poll(consumer) == [b"a"]
    consumer.assign([])
    assert consumer.poll(timeout_s=0.0) == []


def test_assigned_queues_follow_a_reset(consume, group):
    consumer = consume(expression=None, auto_commit=False)
    consumer.assign([Q0])
    poll(consumer, 5)
    group.reset_to(Q0, 4)
    assert poll(consumer) == [b"4"]


def test_assign_and_subscribe_exclude_each_other(consume):
    consumer = consume()
    with pytest.raises(ClientStateError, match="uses subscribe, so it cannot use assign"):
        consumer.assign([Q0])
    consumer = consume(expression=None)
    consumer.assign([Q0])
    with pytest.raises(ClientStateError, match="uses assign, so it cannot use subscribe"):
        consumer.subscribe("orders")


def test_only_queues_that_there_are_can_be_assigned(consume):
    consumer = consume(expression=None)
    with pytest.raises(InvalidArgumentError, match="orders@a:7 does not exist"):
        consumer.assign([MessageQueue("orders", "a", 7)])
    with pytest.raises(InvalidArgumentError, match=r"expected a raymq\.MessageQueue"):
        consumer.assign(["orders"])
    with pytest.raises(InvalidArgumentError, match="contains no tag"):
        consumer.assign([Q0], "||")
    with pytest.raises(ClientStateError, match="no subscription"):
        consumer.poll()


# Tests of a consumer's positions and of seeks


def test_seek_moves_the_position_in_a_held_queue_and_is_committed(consume, group):
    consumer = consume()
    poll(consumer, 5)
    consumer.poll(timeout_s=0.0)
    group.has(q0=5)
    consumer.seek(Q0, 3)
    assert consumer.position(Q0) == 3
    assert poll(consumer, 2) == [b"3", b"4"]
    eventually(lambda: any(wish.get(Q0) == OffsetCommit(3, 1, 0, True) for wish in group.commits), "going back", WAIT_S)


def test_seek_to_the_begin_and_to_the_end(consume):
    consumer = consume()
    poll(consumer, 2, max_messages=2)
    consumer.seek_to_end(Q0)
    assert consumer.position(Q0) == 5
    assert consumer.poll(timeout_s=0.0) == []
    consumer.seek_to_begin(Q0)
    assert consumer.position(Q0) == 0
    assert poll(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("offset", [-1, 6])
def test_seek_outside_the_queues_offsets_is_refused(consume, offset):
    consumer = consume()
    poll(consumer, 5)
    with pytest.raises(OffsetOutOfRangeError):
        consumer.seek(Q0, offset)
    assert consumer.position(Q0) == 5


def test_a_queue_that_is_not_held_has_no_place(consume, group):
    group.granted = {Q0}
    consumer = consume()
    poll(consumer, 5)
    for call in (
        lambda: consumer.seek(Q1, 0),
        lambda: consumer.seek_to_begin(Q1),
        lambda: consumer.seek_to_end(Q1),
        lambda: consumer.position(Q1),
        lambda: consumer.pause([Q1]),
        lambda: consumer.resume([Q1]),
        lambda: consumer.commit({Q1: 0}),
    ):
        with pytest.raises(ClientStateError, match="orders@a:1 is not assigned"):
            call()


def test_a_paused_queue_is_silent_until_it_is_resumed(consume, store):
    store.append([make_batch([b"a", b"b"], queue_id=1)])
    consumer = consume()
    holds(consumer, Q0, Q1)
    consumer.pause([Q0])
    assert consumer.paused() == [Q0]
    assert poll(consumer, 2) == [b"a", b"b"]
    assert consumer.poll(timeout_s=0.05) == []
    consumer.resume([Q0])
    assert consumer.paused() == []
    assert poll(consumer, 5) == [b"0", b"1", b"2", b"3", b"4"]


def test_offsets_of_any_queue_can_be_asked_for(consume, store):
    consumer = consume(expression=None)
    assert consumer.fetch_message_queues("orders") == [Q0, Q1]
    assert consumer.begin_offsets([Q0, OTHER]) == {Q0: 0, OTHER: 0}
    assert consumer.end_offsets([Q0, Q1]) == {Q0: 5, Q1: 0}
    assert consumer.offset_for_timestamp(Q0, 0) == 0
    assert consumer.offsets_for_times({Q0: 2**60, Q1: 0}) == {Q0: 5, Q1: 0}
    assert consumer.committed(Q1) is None
    for times in ({Q0: "yesterday"}, {MessageQueue("orders", "b", 0): 0}):
        with pytest.raises(InvalidArgumentError):
            consumer.offsets_for_times(times)


def test_lag_counts_messages_after_the_position(consume, store):
    consumer = consume()
    holds(consumer, Q0, Q1)
    poll(consumer, 2, max_messages=2)
    store.append([make_batch([b"5"])])
    assert consumer.lag() == {Q0: 4, Q1: 0}


def test_a_listener_is_called_when_a_topics_queues_change(consume, routes):
    consumer = consume(expression=None, queue_check_interval_s=0.01)
    calls = []
    consumer.register_queue_change_listener("orders", lambda topic, queues: calls.append((topic, queues)))
    routes.routes["orders"] = topic_route(a=3)
    eventually(lambda: calls, "the call", WAIT_S)
    assert calls == [("orders", [Q0, Q1, MessageQueue("orders", "a", 2)])]


# Tests of closing a consumer, and of using a closed consumer


def test_close_commits_finished_messages_and_leaves_the_group(consume, group):
    closed = []
    consumer = consume(on_close=closed.append)
    poll(consumer, 2, max_messages=2)
    poll(consumer, 1, max_messages=1)
    consumer.close()
    assert group.committed_offsets[Q0] == 3
    assert group.heartbeats[-1].leaving
    assert closed == [consumer.engine]
    consumer.close()


def test_every_call_after_close_raises(consume):
    consumer = consume()
    consumer.close()
    for name, arguments in {
        "poll": (),
        "poll_table": (),
        "commit": (),
        "committed": (Q0,),
        "subscribe": ("orders",),
        "unsubscribe": ("orders",),
        "assign": ([Q0],),
        "assignment": (),
        "position": (Q0,),
        "seek": (Q0, 0),
        "seek_to_begin": (Q0,),
        "seek_to_end": (Q0,),
        "pause": ([Q0],),
        "resume": ([Q0],),
        "paused": (),
        "lag": (),
        "fetch_message_queues": ("orders",),
        "begin_offsets": ([Q0],),
        "end_offsets": ([Q0],),
        "offset_for_timestamp": (Q0, 0),
        "offsets_for_times": ({Q0: 0},),
        "register_queue_change_listener": ("orders", print),
    }.items():
        with pytest.raises(ClientStateError, match="closed"):
            getattr(consumer, name)(*arguments)


def test_an_exception_in_a_with_leaves_the_last_polls_messages_uncommitted(consume, group):
    consumer = consume(auto_commit_interval_s=3600.0)
    poll(consumer, 2, max_messages=2)
    poll(consumer, 1, max_messages=1)
    with pytest.raises(ZeroDivisionError), consumer:
        raise ZeroDivisionError
    assert group.committed_offsets[Q0] == 2


def test_a_close_that_cannot_commit_raises_and_closes(consume, group):
    consumer = consume(auto_commit_interval_s=3600.0)
    poll(consumer, 2, max_messages=2)
    group.commit_failure = AWAY
    with pytest.raises(ServiceNotAvailableError):
        consumer.close()
    assert group.heartbeats[-1].leaving
    consumer.close()


def test_bad_arguments_are_refused(consume):
    consumer = consume(expression=None)
    with pytest.raises(ClientStateError, match="no subscription"):
        consumer.poll()
    with pytest.raises(IllegalNameError):
        consumer.subscribe("a.b")
    with pytest.raises(InvalidArgumentError, match="contains no tag"):
        consumer.subscribe("orders", "||")
    consumer.subscribe("orders")
    for arguments in (
        {"max_messages": 0},
        {"max_messages": 1.0},
        {"max_messages": True},
        {"timeout_s": -1.0},
        {"timeout_s": float("nan")},
        {"timeout_s": "1"},
    ):
        [name] = arguments
        with pytest.raises(InvalidArgumentError, match=name):
            consumer.poll(**arguments)
    holds(consumer, Q0, Q1)
    with pytest.raises(InvalidArgumentError, match="whole number"):
        consumer.seek(Q0, "0")


def test_a_consumer_cannot_be_pickled(consume):
    consumer = consume(expression=None)
    with pytest.raises(TypeError, match="in the process that uses"):
        pickle.dumps(getattr(consumer, "_consumer", consumer))


# Tests of acknowledging each message


def test_messages_are_committed_by_their_acknowledgements(consume, group):
    consumer = consume(acknowledge_each=True)
    messages = []
    while len(messages) < 5:
        messages += consumer.poll(timeout_s=WAIT_S)
    consumer.acknowledge([messages[0], messages[2]])
    group.has(q0=1)
    consumer.poll(timeout_s=0.0)
    consumer.acknowledge(messages[3:4])
    assert group.committed_offsets[Q0] == 1
    consumer.acknowledge([messages[1]])
    group.has(q0=4)
    consumer.close()
    assert group.committed_offsets[Q0] == 4, "the last one is not acknowledged"


def test_a_queue_goes_to_the_next_member_once_its_messages_are_acknowledged(consume, group):
    consumer = consume(acknowledge_each=True)
    messages = consumer.poll(max_messages=1, timeout_s=WAIT_S)
    group.grant(Q1)
    holds(consumer, Q1)
    group.hears(Q0, Q1)
    consumer.acknowledge(messages)
    group.hears(Q1)
    assert group.committed_offsets[Q0] == 1


def test_a_consumer_that_acknowledges_each_message_has_no_other_way(consume):
    consumer = consume(acknowledge_each=True)
    poll(consumer, 1)
    with pytest.raises(ClientStateError, match="call acknowledge"):
        consumer.commit({Q0: 1})
    with pytest.raises(ClientStateError, match=r"call poll\(\)"):
        consumer.poll_table()
    with pytest.raises(ClientStateError, match="with acknowledge_each=True"):
        consume().acknowledge([])
    with pytest.raises(InvalidArgumentError, match="do not set auto_commit=False"):
        consume(acknowledge_each=True, auto_commit=False)


def test_a_message_is_sent_back_as_the_record_that_was_consumed(consume, storage, monkeypatch):
    calls = []

    class Broker:
        def __init__(self, name):
            self.name = name

        def call(self, method, *args, timeout_s, **more):
            calls.append((self.name, method, *args, more))

    monkeypatch.setattr(send_back, "ActorRef", Broker)
    storage.record_at = lambda offset, timeout_s: b"record at %d" % offset
    consumer = consume(acknowledge_each=True)
    [message] = consumer.poll(max_messages=1, timeout_s=WAIT_S)
    consumer.send_back(message, delay_level=2, max_reconsume_times=5)
    consumer.send_back(message)
    call = ("a", "send_back", "billing", b"record at %d" % message.physical_offset)
    assert calls == [
        (*call, {"delay_level": 2, "max_reconsume_times": 5}),
        (*call, {"delay_level": 0, "max_reconsume_times": -1}),
    ]


def test_a_subscription_that_cannot_join_the_group_joins_at_the_next_call(consume, store, monkeypatch):
    consumer = consume(expression=None)

    def fail(group, source):
        raise ClientStateError("no thread")

    with monkeypatch.context() as patch:
        patch.setattr(consumer.engine._member._rebalance, "join", fail)
        with pytest.raises(ClientStateError, match="no thread"):
            consumer.subscribe("orders", "*")
    consumer.subscribe("orders", "*")
    assert poll(consumer, 5) == [b"%d" % number for number in range(5)]
