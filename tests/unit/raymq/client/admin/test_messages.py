"""Tests of Admin's message queries and of the command that uses them, with two real stores in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from raymq.client.admin.admin import Admin
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import Message, MessageQueue
from raymq.common.numbers import NUMBER_MAX
from raymq.common.protocol.route import BrokerData, QueueData, TopicRoute
from raymq.common.protocol.store import Boundary
from raymq.records.format.encode import encode_batch
from raymq.tools import cli
from storage.message_store import MessageStore
from tests.support.clients.fakes import connect_commands
from tests.support.stores.stores import small_settings


class FakeStorage:
    """Fake StorageClient that runs the queries on a store in this process."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    def query_by_key(self, topic, key, max_num, begin_ms, end_ms, timeout_s):
        return self._store.queries.by_key(topic, key, max_num, begin_ms, end_ms)

    def query_by_unique_id(self, topic, message_id, timeout_s):
        return self._store.queries.by_unique_id(topic, message_id)

    def record_at(self, physical_offset, timeout_s):
        return self._store.queries.by_physical_offset(physical_offset)

    def offset_by_time(self, topic, queue_id, timestamp_ms, timeout_s, boundary):
        return self._store.queues.offset_by_time(topic, queue_id, timestamp_ms, boundary)


@pytest.fixture
def admin(tmp_path) -> Iterator[Admin]:
    """Yield an Admin over ten stored messages n0 … n9, which alternate between two broker groups. Each message has a
    key of its own and a key that all messages have."""
    times = iter(range(1_700_000_000_000, 1_800_000_000_000, 1000))
    names = ["broker-a", "broker-b"]
    stores = {}
    for port, name in enumerate(names):
        settings = small_settings(tmp_path / name)
        stores[name] = MessageStore.open(
            settings, broker_name=name, store_host=("127.0.0.1", port), clock_ms=lambda: next(times)
        )
    for number in range(10):
        batch = encode_batch([Message("orders", b"n%d" % number, keys=(f"k{number}", "all"))], 0,
                             born_host=("127.0.0.1", 1), born_timestamp_ms=1, message_ids=[f"ID{number}"])  # fmt: skip
        stores[names[number % 2]].append([batch])
    brokers = {name: BrokerData("c", name, {0: f"storage-{name}-0"}) for name in names}
    route = TopicRoute("orders", brokers, tuple(QueueData(name, 1, 1, 6) for name in names))
    storages = SimpleNamespace(get=lambda name: FakeStorage(stores[name.removeprefix("storage-").removesuffix("-0")]))
    yield Admin(SimpleNamespace(get=lambda topic: route, wait=lambda topic, timeout_s: route), storages)
    for store in stores.values():
        store.close()


def bodies(messages) -> list[bytes]:
    return [message.body for message in messages]


def test_messages_of_all_broker_groups_are_found_by_key_in_the_order_they_were_stored(admin):
    assert bodies(admin.query_by_key("orders", "all")) == [b"n%d" % number for number in range(10)]
    assert bodies(admin.query_by_key("orders", "all", max_messages=3)) == [b"n7", b"n8", b"n9"]
    assert bodies(admin.query_by_key("orders", "k3")) == [b"n3"]
    assert admin.query_by_key("orders", "nothing") == []
    assert bodies(admin.query_by_key("orders", "all", begin_ms=1_700_000_007_500)) == [b"n8", b"n9"]
    assert bodies(admin.query_by_key("orders", "all", broker_name="broker-b")) == [b"n1", b"n3", b"n5", b"n7", b"n9"]
    with pytest.raises(InvalidArgumentError):
        admin.query_by_key("orders", " ")
    with pytest.raises(InvalidArgumentError, match="no queue in broker group 'broker-c'"):
        admin.query_by_key("orders", "all", broker_name="broker-c")


def test_a_message_is_found_by_either_of_its_ids(admin):
    for number in range(10):
        [message] = admin.query_by_id("orders", f"ID{number}")
        assert message.body == b"n%d" % number
        assert message.broker_name == ["broker-a", "broker-b"][number % 2]
        assert admin.query_by_id("orders", message.offset_message_id) == [message]
        assert admin.query_by_id("orders", message.offset_message_id.lower()) == [message]
    assert admin.query_by_id("orders", "F" * 32) == []
    assert admin.query_by_id("orders", "nobody") == []


def test_offsets_by_time_have_both_boundaries(admin):
    queue = MessageQueue("orders", "broker-a", 0)
    times = [message.store_timestamp_ms for message in admin.query_by_key("orders", "all")[::2]]
    for offset, at in enumerate(times):
        assert admin.offset_by_time(queue, at) == admin.offset_by_time(queue, at, Boundary.UPPER) == offset
        assert admin.offset_by_time(queue, at + 1) == offset + 1
        assert admin.offset_by_time(queue, at + 1, Boundary.UPPER) == offset
    assert admin.offset_by_time(queue, 0) == admin.offset_by_time(queue, 0, Boundary.UPPER) == 0


def test_the_greatest_numbers_take_effect(admin):
    assert len(admin.query_by_key("orders", "all", max_messages=NUMBER_MAX, begin_ms=0, end_ms=NUMBER_MAX)) == 10
    assert admin.query_by_key("orders", "all", begin_ms=NUMBER_MAX) == []
    assert admin.query_by_key("orders", "all", end_ms=0) == []
    queue = MessageQueue("orders", "broker-a", 0)
    assert admin.offset_by_time(queue, NUMBER_MAX) == 5
    assert admin.offset_by_time(queue, NUMBER_MAX, Boundary.UPPER) == 4


@pytest.mark.parametrize("queue_id", [-1, 2**31, 2**200, True, 0.0, "0", None])
def test_a_queue_with_an_absurd_id_is_refused(admin, queue_id):
    queue = MessageQueue("orders", "broker-a", queue_id)
    for call in (lambda: admin.offset_by_time(queue, 0), lambda: admin.pull(queue, 0)):
        with pytest.raises(InvalidArgumentError, match="queue: queue_id must be"):
            call()


@pytest.fixture
def run(admin, monkeypatch):
    connect_commands(monkeypatch, SimpleNamespace(admin=admin))
    return lambda *arguments: CliRunner().invoke(cli.cli, ["query", "orders", *arguments])


def test_the_command_prints_messages_by_key_and_by_id(run):
    found = json.loads(run("--key", "all", "--max", "2", "--json").output)
    assert [message["body"] for message in found["messages"]] == ["n8", "n9"]
    one = json.loads(run("--id", "ID4", "--json").output)
    assert (one["body"], one["keys"]) == ("n4", ["k4", "all"])
    assert "n4" in run("--id", one["offset_message_id"]).output


@pytest.mark.parametrize("arguments", [(), ("--key", "a", "--id", "b")])
def test_the_command_wants_one_way_to_look(run, arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "one of --key, --id and --offset" in result.output
    assert "'here' is not an offset of a queue" in run("--offset", "here").output


@pytest.mark.parametrize("arguments", [("--key", "none"), ("--id", "none")])
def test_nothing_found_is_an_error(run, arguments):
    assert isinstance(run(*arguments).exception, InvalidArgumentError)
