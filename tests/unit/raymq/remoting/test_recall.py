"""Tests of recalling delayed messages: recall handles, the client's checks before the request to the store, and the
meaning of the store's answer."""

from __future__ import annotations

import pytest

from raymq.common.errors import NotMasterError, RecallError
from raymq.common.message import SendStatus
from raymq.common.protocol.recall import RecallHandle, delete_key
from raymq.common.protocol.store import AppendResult
from raymq.records.format.decode import decode_records
from raymq.remoting.recall import check_recall, recall_batch, send_recall
from tests.support.clients.fakes import FakeRoutes, topic_route

NOW_MS = 1_799_999_000_000
HANDLE = RecallHandle("orders", "broker-a", 1_800_000_000_000, "0A0000011A2B18B4AAC23B9ACA000005")
TEXT = "djEgb3JkZXJzIGJyb2tlci1hIDE4MDAwMDAwMDAwMDAgMEEwMDAwMDExQTJCMThCNEFBQzIzQjlBQ0EwMDAwMDU="


def test_golden_159_the_handle_is_rocketmqs():
    assert str(HANDLE) == TEXT
    assert RecallHandle.parse(TEXT) == HANDLE
    assert check_recall("orders", TEXT, NOW_MS) == HANDLE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "xx",
        "djIgb3JkZXJzIGJyb2tlci1hIDE4MDAwMDAwMDAwMDAgSUQ=",  # a recall handle of version v2
        "djEgb3JkZXJzIGJyb2tlci1h",  # a recall handle with only three parts
        "djEgb3JkZXJzIGJyb2tlci1hIHNvb24gSUQ=",  # a recall handle whose time is not a number
        "ümlaut",
        None,
    ],
)
def test_golden_160_an_invalid_recall_handle_is_refused(text):
    with pytest.raises(RecallError, match="is not a recall handle") as caught:
        RecallHandle.parse(text)
    assert caught.value.code == 604


def test_golden_161_the_delete_key():
    assert delete_key("orders", "ID1") == "orders+ID1"


def test_the_checks_of_a_recall():
    with pytest.raises(RecallError, match="of topic 'orders', not of topic 'other'"):
        check_recall("other", TEXT, NOW_MS)
    with pytest.raises(RecallError, match="was due 0 ms ago"):
        check_recall("orders", TEXT, HANDLE.deliver_at_ms)
    with pytest.raises(RecallError, match="names an impossible delivery time"):
        check_recall("orders", TEXT, HANDLE.deliver_at_ms - 41 * 86_400_000)


def test_the_record_is_rocketmqs_deletion_record(monkeypatch):
    monkeypatch.setattr("raymq.common.message.time.time_ns", lambda: NOW_MS * 1_000_000)
    batch = recall_batch(HANDLE, ("127.0.0.1", 1), NOW_MS, "p")
    [message] = decode_records(batch.records, broker_name="broker-a")
    assert (message.body, message.tags, message.message_id) == (b"0", "_RECALL_TAG_", HANDLE.message_id)
    properties = message.system_properties
    assert properties["TIMER_DEL_UNIQKEY"] == f"orders+{HANDLE.message_id}"
    assert properties["TIMER_DELIVER_MS"] == "1800000000000"
    assert (properties["REAL_TOPIC"], properties["REAL_QID"]) == ("orders", "0")


class Store:
    """Fake store that answers with the given store times or errors, and records the batches."""

    def __init__(self, *answers) -> None:
        self.answers, self.batches = list(answers), []

    def append(self, batches, timeout_s):
        self.batches += batches
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [AppendResult(SendStatus.SEND_OK, 0, 0, answer)]


def recall_at(store: Store, monkeypatch) -> None:
    monkeypatch.setattr("raymq.common.message.time.time_ns", lambda: NOW_MS * 1_000_000)
    routes = FakeRoutes(topic_route(**{"broker-a": 1}))
    send_recall(HANDLE, routes=routes, storage=lambda name: store, born_host=("127.0.0.1", 1), timeout_s=30.0)


def test_a_recall_is_sent_again_as_the_same_until_it_is_answered(monkeypatch):
    store = Store(NotMasterError("broker-a", 1), HANDLE.deliver_at_ms - 1)
    recall_at(store, monkeypatch)
    first, second = store.batches
    assert (first.records, first.producer) == (second.records, second.producer)


def test_a_recall_that_was_stored_when_the_message_was_due_is_too_late(monkeypatch):
    with pytest.raises(RecallError, match="was due 0 ms before its recall was stored"):
        recall_at(Store(HANDLE.deliver_at_ms), monkeypatch)
