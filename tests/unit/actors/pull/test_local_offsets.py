"""Tests of the file in which a broadcasting consumer instance stores its offsets, with a crash at each step of
a write."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from actors.pull import local_offsets
from actors.pull.local_offsets import LocalFileOffsetStore, LocalOffsets
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import NoPermissionError, ServiceNotAvailableError
from raymq.common.message import MessageModel, MessageQueue
from raymq.common.protocol.group import OffsetCommit, QueueOffset

Q, P = MessageQueue("orders", "broker-a", 0), MessageQueue("orders", "broker-b", 3)


def test_saved_offsets_are_loaded_by_the_next_instance(tmp_path):
    directory = tmp_path / "group" / "instance"
    assert LocalOffsets(directory).load() == {}
    LocalOffsets(directory).save({Q: 5, P: 7})
    assert LocalOffsets(directory).load() == {Q: 5, P: 7}


@pytest.mark.parametrize("damage", ["", "{", '{"offsetTable": [{'])
def test_a_damaged_file_is_replaced_by_its_second_copy(tmp_path, damage):
    offsets = LocalOffsets(tmp_path)
    offsets.save({Q: 5})
    offsets.save({Q: 6})
    (tmp_path / "offsets.json").write_text(damage)
    assert offsets.load() == {Q: 6}
    for name in ("offsets.json", "offsets.json.bak"):
        (tmp_path / name).write_text(damage)
    with pytest.raises(ServiceNotAvailableError, match="repair or delete the file"):
        offsets.load()


@pytest.mark.parametrize("step", [1, 2])
def test_a_crash_between_any_two_steps_leaves_the_old_or_the_new_offsets(tmp_path, monkeypatch, step):
    offsets = LocalOffsets(tmp_path)
    offsets.save({Q: 5})
    calls = 0
    replace = os.replace

    def failing(source, target):
        nonlocal calls
        calls += 1
        if calls == step:
            raise OSError("no space")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(ServiceNotAvailableError, match="no space"):
        offsets.save({Q: 6})
    monkeypatch.undo()
    assert LocalOffsets(tmp_path).load() == ({Q: 5} if step == 1 else {Q: 6})
    offsets.save({Q: 7})
    assert LocalOffsets(tmp_path).load() == {Q: 7}


class Brokers:
    """Fake of the group's brokers. They only return the start offset that the settings demand."""

    refusal: Exception | None = None

    def __init__(self) -> None:
        self.checked: list[tuple[str, list[str]]] = []

    def check_broadcast(self, broker_name, timeout_s, topics):
        self.checked.append((broker_name, topics))
        if self.refusal is not None:
            raise self.refusal

    def ensure_group(self, broker_name, timeout_s):
        pass

    def start_offset(self, queue, query, generation, timeout_s):
        assert generation == 0
        return QueueOffset(99)


def test_in_broadcasting_offsets_come_from_the_file_or_else_from_the_settings(tmp_path):
    settings = PushSettings(
        "billing", (Subscription.parse("orders"),), message_model=MessageModel.BROADCASTING, offsets_dir=str(tmp_path)
    )
    store = LocalFileOffsetStore("pull-billing-0", settings, Brokers())
    store.prepare("broker-a", 1.0)
    assert store.start_offsets({Q: 0}) == {}
    assert store.start_offset(Q, 0) == QueueOffset(99)
    store.commit_offsets({Q: OffsetCommit(120, 0, 0), P: OffsetCommit(None, 0, 0)}, 1.0)
    brokers = Brokers()
    again = LocalFileOffsetStore("pull-billing-0", settings, brokers)
    again.prepare("broker-a", 1.0)
    assert again.start_offsets({Q: 0, P: 0}) == {Q: QueueOffset(120)}
    assert sorted(brokers.checked) == sorted((name, ["orders"]) for name in {Q.broker_name, P.broker_name})
    brokers.refusal = NoPermissionError("consume_broadcast_enable is off")
    assert again.start_offsets({Q: 0}) == {}
    with pytest.raises(NoPermissionError):
        again.start_offset(Q, 0)


def test_a_broadcasting_instance_stops_when_reading_is_forbidden(tmp_path, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(local_offsets, "time", SimpleNamespace(monotonic=lambda: now_s))
    settings = PushSettings(
        "billing", (Subscription.parse("orders"),), message_model=MessageModel.BROADCASTING, offsets_dir=str(tmp_path)
    )
    brokers = Brokers()
    store = LocalFileOffsetStore("pull-billing-0", settings, brokers)
    store.prepare("broker-a", 1.0)
    commits = {Q: OffsetCommit(120, 0, 0)}
    assert store.commit_offsets(commits, 1.0).stopped == {}
    brokers.refusal = NoPermissionError("forbidden to read")
    assert store.commit_offsets(commits, 1.0).stopped == {}, "not asked with each commit"
    now_s += local_offsets.RESET_QUERY_INTERVAL_S
    assert store.commit_offsets(commits, 1.0).stopped == {Q: "forbidden to read"}
    assert store.commit_offsets(commits, 1.0).stopped == {Q: "forbidden to read"}, "as it said last"
    brokers.refusal = ServiceNotAvailableError("away")
    now_s += local_offsets.RESET_QUERY_INTERVAL_S
    assert store.commit_offsets(commits, 1.0).stopped == {Q: "forbidden to read"}, (
        "a broker that is away changes nothing"
    )
    asked = len(brokers.checked)
    now_s += local_offsets.RESET_QUERY_INTERVAL_S
    store.commit_offsets(commits, 1.0)
    assert len(brokers.checked) == asked, "which is asked again only after a pause"
    brokers.refusal = None
    now_s += local_offsets.BROADCAST_CHECK_PAUSE_S
    assert store.commit_offsets(commits, 1.0).stopped == {}


def test_a_stored_offset_is_ignored_for_a_recreated_topic(tmp_path):
    settings = PushSettings(
        "billing", (Subscription.parse("orders"),), message_model=MessageModel.BROADCASTING, offsets_dir=str(tmp_path)
    )
    ids: dict[str, dict[str, str]] = {}

    def start(known: dict[str, dict[str, str]]) -> dict[MessageQueue, QueueOffset]:
        """Start a new incarnation of the consumer instance, and return its start offsets. The incarnation then commits
        the offsets 225 and 7."""
        store = LocalFileOffsetStore("pull-billing-0", settings, Brokers(), lambda topics: known)
        store.prepare("broker-a", 1.0)
        starts = store.start_offsets({Q: 0, P: 0})
        store.commit_offsets({Q: OffsetCommit(225, 0, 0), P: OffsetCommit(7, 0, 0)}, 1.0)
        return starts

    assert start(ids) == {}
    both = {Q: QueueOffset(225), P: QueueOffset(7)}
    first = {"orders": {"broker-a": "1", "broker-b": "1"}}
    assert [start(known) for known in (ids, first, first, ids)] == [both] * 4, "an id that is not known says nothing"
    assert start({"orders": {"broker-a": "2", "broker-b": "1"}}) == {Q: QueueOffset(0), P: QueueOffset(7)}
    assert start({"orders": {"broker-a": "2", "broker-b": "1"}}) == both
