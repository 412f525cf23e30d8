"""Tests of messages that a simple consumer cannot read. Such a message is delivered again up to the same number of
times as any other message, and then becomes a dead letter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raymq.client.consumer.simple import taken_messages
from raymq.client.consumer.simple.lease_reader import LeasedMessages, LeaseReader, UnreadableMessage
from raymq.client.consumer.simple.taken_messages import MessageTaker
from raymq.common.message import MessageExt, MessageQueue
from raymq.common.namespaces import NO_NAMESPACE
from raymq.common.protocol.pop import LeasedRange, ReceiveAnswer
from raymq.common.protocol.store import RepairState
from raymq.records.format.places import RecordPlaces
from raymq.records.kernels.messages import find_unreadable, read_messages
from tests.unit.raymq.records.kernels.test_unreadable import ZSTD, changed as changed_record, flip, stored

QUEUE = MessageQueue("orders", "broker-a", 5)


class Calls:
    """Fake broker that records the calls about leased messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        monkeypatch.setattr(taken_messages, "ActorRef", lambda name: SimpleNamespace(call=self.call))

    def call(self, method: str, *args: Any, **how: Any) -> int:
        self.made.append((method, args, how))
        return 0


def leased(attempts: int) -> tuple[LeasedRange, LeasedMessages]:
    """Return a lease of four messages. The second message's body does not match its compression flag. The third
    message's record is damaged."""
    located = changed_record(stored([b"one", b"two", b"three", b"four"], {1: ZSTD}), 2, flip(5))
    messages = read_messages(
        located.data, located.starts, broker_name="broker-a", places=RecordPlaces.of(QUEUE, located)
    )
    found = LeasedMessages([messages[0], messages[3]], [(located, [0, 3])], 44)
    for index, error in find_unreadable(messages).items():
        found.unreadable[40 + index] = UnreadableMessage(
            messages[index], error, located.part(index, index + 1).joined()
        )
    return LeasedRange("orders", 5, 40, 4, 1, 60_000, attempts), found


def take(
    monkeypatch: pytest.MonkeyPatch, attempts: int, retry_max_times: int, state: RepairState = RepairState.LOST
) -> tuple[list[MessageExt], Calls]:
    calls = Calls(monkeypatch)
    monkeypatch.setattr(LeaseReader, "report_damage", lambda _, queue, offsets: [state for _ in offsets])
    reader = LeaseReader(None, None)  # type: ignore[arg-type]  # not asked
    taker = MessageTaker("billing", reader, NO_NAMESPACE, lambda name, method, *args: calls.call(method, *args))
    given, found = leased(attempts)
    return list(taker._take("broker-a", given, found, ReceiveAnswer((given,), retry_max_times))), calls


def test_the_neighbours_are_delivered_and_the_unreadable_one_keeps_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, calls = take(monkeypatch, attempts=1, retry_max_times=2)
    assert [message.body for message in messages] == [b"one", b"four"]
    [(method, (_, [part]), _)] = calls.made
    assert method == "ack_messages", "of the damaged record, which nobody can deliver or copy"
    assert int(part.offsets, 16) == 0b0100


def test_after_its_last_attempt_it_is_a_dead_letter_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    messages, calls = take(monkeypatch, attempts=3, retry_max_times=2)
    assert [message.body for message in messages] == [b"one", b"four"]
    (sent, (group, record), how), (method, (_, [part]), _) = calls.made
    assert (sent, group, how["delay_level"]) == ("send_back", "billing", -1)
    assert b"two" in record
    assert "compressed body" in how["reason"]
    assert (method, int(part.offsets, 16)) == ("ack_messages", 0b0110)


@pytest.mark.parametrize("state", [RepairState.PENDING, RepairState.INTACT])
def test_a_damaged_message_that_a_replica_may_repair_is_received_again_soon(
    monkeypatch: pytest.MonkeyPatch, state: RepairState
) -> None:
    messages, calls = take(monkeypatch, attempts=1, retry_max_times=2, state=state)
    assert [message.body for message in messages] == [b"one", b"four"]
    [(method, (group, [part], invisible_ms, counted), _)] = calls.made
    assert (method, group, counted) == ("change_invisible", "billing", False)
    assert int(part.offsets, 16) == 0b0100
    assert invisible_ms == taken_messages.REPAIR_AGAIN_MS


def test_a_damaged_message_is_not_received_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taken_messages, "READ_REPAIR_WAIT_S", 0.0)
    _, calls = take(monkeypatch, attempts=1, retry_max_times=2, state=RepairState.PENDING)
    assert "change_invisible" not in [method for method, _, _ in calls.made]


def test_a_receive_reads_about_as_many_bytes_as_asked_and_returns_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    located = stored([b"one", b"two", b"three", b"four"], {})
    messages = read_messages(
        located.data, located.starts, broker_name="broker-a", places=RecordPlaces.of(QUEUE, located)
    )
    limits: list[int] = []

    def read(_: LeaseReader, name: str, given: LeasedRange, wanted: object, max_bytes: int) -> LeasedMessages:
        limits.append(max_bytes)
        return LeasedMessages(messages[:2], [(located, [0, 1])], 42, size_bytes=70)

    monkeypatch.setattr(LeaseReader, "read", read)
    reader = LeaseReader(None, None)  # type: ignore[arg-type]  # not asked
    taker = MessageTaker("billing", reader, NO_NAMESPACE, lambda name, method, *args: calls.call(method, *args))
    given = [LeasedRange("orders", 5, start, 4, 1, 60_000, 1) for start in (40, 50)]
    found = taker.take("broker-a", ReceiveAnswer(tuple(given), 2, (), (5.0,)), {}, 60)
    assert (limits, [message.body for message in found]) == ([60], [b"one", b"two"])
    receipt = found[0]._receipt
    assert (receipt.retry_max_times, receipt.retry_intervals_s, receipt.size_bytes) == (2, (5.0,), 70)
    changed = [(args, how) for method, args, how in calls.made if method == "change_invisible"]
    [((group, parts, invisible_ms, counted), _)] = changed
    assert (group, invisible_ms, counted) == ("billing", 0, False)
    assert [(part.start, int(part.offsets, 16)) for part in parts] == [(40, 0b1100), (50, 0b1111)]


def test_a_program_that_decides_itself_gets_each_message_whatever_its_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    reader = LeaseReader(None, None)  # type: ignore[arg-type]  # not asked
    monkeypatch.setattr(LeaseReader, "report_damage", lambda _, queue, offsets: [RepairState.LOST for _ in offsets])
    taker = MessageTaker(
        "billing", reader, NO_NAMESPACE, lambda name, method, *args: calls.call(method, *args), gives_up=False
    )
    given, found = leased(1000)
    messages = taker._take("broker-a", given, found, ReceiveAnswer((given,), 2))
    assert [(message.body, message.attempt) for message in messages] == [(b"one", 1000), (b"four", 1000)]
    assert "send_back" not in [method for method, _, _ in calls.made]
