"""Tests of Admin on a topic in which every second message is unreadable: Admin finds all intact messages without
errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from actors.core.broker.send_back import read_replayed
from raymq.client.admin import browse as browse_module, dead_letters
from raymq.client.consumer import pull_once, repair_wait
from raymq.common.errors import BodyUnreadableError, ServiceNotAvailableError
from raymq.common.message import MessageExt, MessageQueue
from raymq.records.format.check import find_starts
from raymq.tools.cli.terminal.output import message_dict, message_line
from tests.support.clients.fakes import WAIT_S
from tests.support.history.waiting import eventually
from tests.support.stores.damaged_topic import TOPIC, DamagedTopic, damaged_topic, repair_after_reports
from tests.support.stores.stores import read_queue

QUEUE = MessageQueue(TOPIC, "broker-a", 0)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory) -> Iterator[DamagedTopic]:
    with damaged_topic(tmp_path_factory.mktemp("damaged") / "store") as topic:
        yield topic


def read(message: MessageExt) -> bytes | None:
    """Return a message's body, or None if the body cannot be read. In the second case, first checks that reading the
    body raises the message's error, and that the error contains the message's offset."""
    error = message.body_error
    if error is None:
        return message.body
    assert error.queue == str(QUEUE)
    assert error.queue_offset == message.queue_offset
    assert error.reason
    with pytest.raises(BodyUnreadableError):
        message.body  # noqa: B018
    return None


def check(damaged: DamagedTopic, messages: list[MessageExt]) -> None:
    """Check that `messages` has all messages of the topic in order, and that each message is intact or damaged as
    expected."""
    assert [message.queue_offset for message in messages] == list(range(len(damaged.bodies)))
    for message, body in zip(messages, damaged.bodies, strict=True):
        kind = damaged.kinds.get(message.queue_offset)
        found = read(message)
        assert found == body, kind


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_pull_hands_over_damaged_messages_in_their_places(damaged, step):
    messages, offset = [], 0
    while offset < len(damaged.bodies):
        result = damaged.admin.pull(QUEUE, offset, max_messages=step, tags="paid")
        assert result.next_offset > offset
        messages, offset = [*messages, *result.messages], result.next_offset
    check(damaged, messages)


def test_a_message_whose_size_alone_was_flipped_is_whole(tmp_path):
    with damaged_topic(tmp_path / "store", lying=False, flipped=("size",)) as topic:
        bodies = [message.body for message in topic.admin.pull(QUEUE, 0).messages]
        assert [bodies[0], bodies[2]] == topic.readable
        assert [body[:10] for body in bodies] == [b"intact %03d" % offset for offset in range(3)]


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("limit", [1, 5, 1000])
def test_browse_continues_after_damaged_messages(damaged, limit, newest_first):
    messages, cursor = [], None
    while True:
        page = damaged.admin.browse(TOPIC, newest_first=newest_first, limit=limit, cursor=cursor, tags="paid")
        messages += page.messages
        cursor = page.cursor
        if cursor is None:
            break
    check(damaged, messages[::-1] if newest_first else messages)


def test_browse_for_a_text_shows_unreadable_messages(damaged):
    page = damaged.admin.browse(TOPIC, contains="intact 000", limit=1000)
    assert {message.queue_offset for message in page.messages} == {0, *damaged.kinds}


def test_a_page_ends_when_its_bodies_are_too_many(damaged, monkeypatch):
    monkeypatch.setattr(browse_module, "BROWSE_PAGE_BYTES", 1000)
    page = damaged.admin.browse(TOPIC, limit=1000, newest_first=False)
    assert page.truncated
    assert 1 < len(page.messages) < 10
    following = damaged.admin.browse(TOPIC, limit=1000, cursor=page.cursor)
    assert following.messages[0].queue_offset == len(page.messages)


def test_a_tail_continues_after_damaged_messages(damaged):
    check(damaged, tailed(damaged))


def test_a_query_by_key_finds_intact_messages_and_reports_the_damaged_ones(damaged):
    found = damaged.admin.query_by_key(TOPIC, "intact", max_messages=64)
    assert [message.body for message in found] == damaged.readable
    flipped = damaged.admin.query_by_key(TOPIC, "flipped", max_messages=64)
    reported = [message for message in flipped if message.body_error is not None]
    assert len(reported) == len(flipped) == 8
    assert all(message.body_error.physical_offset == message.physical_offset for message in reported)
    every = damaged.admin.query_by_key(TOPIC, "all", max_messages=64)
    assert [message.physical_offset for message in every] == sorted(message.physical_offset for message in every)


def test_a_query_by_id_reports_a_damaged_message(damaged):
    for offset, kind in damaged.kinds.items():
        if not kind.startswith("flipped"):
            continue
        [message] = damaged.admin.query_by_id(TOPIC, f"ID{offset}")
        assert message.body_error is not None, kind
        offset_id = damaged.admin.pull(QUEUE, 0, max_messages=1).messages[0].offset_message_id
        [named] = damaged.admin.query_by_id(TOPIC, f"{offset_id[:16]}{message.physical_offset:016X}")
        assert named.body_error is not None, kind
    assert damaged.admin.query_by_id(TOPIC, "nothing") == []


def test_a_replay_sends_readable_messages_and_counts_the_others(damaged):
    done = damaged.admin.replay(TOPIC, begin_ms=0, to_topic="copies")
    assert (done.chosen, done.sent, done.unreadable) == (
        len(damaged.bodies),
        len(damaged.readable),
        len(damaged.kinds),
    )
    assert [message.body for message in read_queue(damaged.store, "copies")] == damaged.readable
    again = damaged.admin.replay(TOPIC, begin_ms=0, to_topic="copies")
    assert (again.sent, again.sent_before) == (0, len(damaged.readable))
    by_key = damaged.admin.replay(TOPIC, key="flipped", to_topic="copies", dry_run=True)
    assert (by_key.chosen, by_key.unreadable) == (8, 8)


def test_commands_print_the_place_and_the_reason(damaged):
    messages = damaged.admin.browse(TOPIC, limit=1000, newest_first=False).messages
    for message, body in zip(messages, damaged.bodies, strict=True):
        fields, line = message_dict(message), message_line(message, as_json=False)
        assert line.startswith(f"broker-a:0:{message.queue_offset}  ")
        if body is not None:
            assert (fields["body"], "error" in fields) == (body.decode(), False)
        else:
            assert fields["body"] is None
            assert fields["error"] in line


def test_a_replay_of_dead_letters_continues_after_a_damaged_letter(damaged, monkeypatch):
    """A replay of dead letters continues after a damaged dead letter. In this test, a topic with a damaged message is
    used as the dead-letter topic. The fake broker refuses damaged messages, as a real broker does."""
    brought: list[bytes] = []
    committed: list[int] = []

    def replay(method: str, group: str, record: bytes, timeout_s: float) -> None:
        read_replayed(record)
        brought.append(record)

    monkeypatch.setattr(dead_letters, "dlq_topic", lambda group: TOPIC)
    monkeypatch.setattr(dead_letters, "retry_topic", lambda group: "nowhere")
    monkeypatch.setattr(dead_letters, "ActorRef", lambda name: SimpleNamespace(call=replay))
    letters = dead_letters.DeadLetters("g", damaged.routes, damaged.storages, lambda: None)
    monkeypatch.setattr(letters, "_offsets", SimpleNamespace(committed_offset=lambda queue: None))
    monkeypatch.setattr(letters, "_commit_replayed", lambda queue, offset: committed.append(offset))
    check(damaged, [letter.message for letter in letters.letters(max_messages=1000)])
    results = list(letters.replay())
    assert len(results) == len(damaged.bodies)
    failed = [result.letter.message.queue_offset for result in results if result.error]
    # A message whose body cannot be decompressed is replayed unchanged. A message with a wrong CRC or damaged fields is
    # refused.
    assert failed == [
        offset for offset, kind in damaged.kinds.items() if kind.startswith("flipped") and offset in failed
    ]
    assert len(failed) >= 4
    assert len(brought) == len(results) - len(failed)
    assert committed[-1] == len(damaged.bodies)


def test_pull_reports_the_damaged_records_to_the_store(tmp_path):
    with damaged_topic(tmp_path / "store") as damaged:
        damaged.admin.pull(QUEUE, 0, max_messages=1000)
        assert damaged.store.reported.settle(60.0)
        queue = damaged.store._parts.queues.get_plain(TOPIC, 0)
        flipped = [offset for offset, kind in damaged.kinds.items() if kind.startswith("flipped")]
        assert [hole.offset for hole in damaged.store.status().holes] == [
            int(queue.units(offset, 1)[0]["physical_offset"]) for offset in flipped
        ]


def test_pull_does_not_fail_if_the_report_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(repair_wait, "ADMIN_REPAIR_WAIT_S", 0.1)
    with damaged_topic(tmp_path / "store") as damaged:

        def refuse(positions, timeout_s):
            raise ServiceNotAvailableError("busy")

        damaged.storage.report_damage = refuse
        assert len(damaged.admin.pull(QUEUE, 0, max_messages=1000).messages) == len(damaged.bodies)


def tailed(damaged: DamagedTopic) -> list[MessageExt]:
    """Return all messages of a tail from the beginning of the topic."""
    admin, positions, messages = damaged.admin, {QUEUE: 0}, list[MessageExt]()

    def tail() -> bool:
        arrived = admin.tail(TOPIC, positions, max_messages=1000)
        messages.extend(arrived.messages)
        positions.update(arrived.positions)
        return positions == {QUEUE: len(damaged.bodies)}

    eventually(tail, "the end of the tail", WAIT_S)
    return messages


def queried_by_id(damaged: DamagedTopic) -> list[MessageExt]:
    ids = [f"ID{offset}" for offset in range(len(damaged.bodies))]
    return [message for one in ids for message in damaged.admin.query_by_id(TOPIC, one)]


def queried_by_offset_id(damaged: DamagedTopic) -> list[MessageExt]:
    host = damaged.admin.pull(QUEUE, 0, max_messages=1).messages[0].offset_message_id[:16]
    queue = damaged.store._parts.queues.get_plain(TOPIC, 0)
    places = [int(queue.units(offset, 1)[0]["physical_offset"]) for offset in range(len(damaged.bodies))]
    return [message for place in places for message in damaged.admin.query_by_id(TOPIC, f"{host}{place:016X}")]


def replayed(damaged: DamagedTopic) -> list[MessageExt]:
    damaged.admin.replay(TOPIC, begin_ms=0, to_topic="copies")
    return read_queue(damaged.store, "copies")


def replayed_by_key(damaged: DamagedTopic) -> list[MessageExt]:
    damaged.admin.replay(TOPIC, key="all", to_topic="copies")
    return read_queue(damaged.store, "copies")


READERS: dict[str, Callable[[DamagedTopic], Sequence[MessageExt]]] = {
    "pull": lambda damaged: damaged.admin.pull(QUEUE, 0, max_messages=1000).messages,
    "browse": lambda damaged: damaged.admin.browse(TOPIC, newest_first=False, limit=1000, max_ms=60_000).messages,
    "browse backwards": lambda damaged: damaged.admin.browse(TOPIC, limit=1000, max_ms=60_000).messages[::-1],
    "tail": tailed,
    "query by key": lambda damaged: damaged.admin.query_by_key(TOPIC, "all", max_messages=64),
    "query by id": queried_by_id,
    "query by offset id": queried_by_offset_id,
    "replay": replayed,
    "replay by key": replayed_by_key,
}


@pytest.mark.parametrize("reader", READERS)
def test_readers_return_damaged_messages_after_their_repair(tmp_path, monkeypatch, reader):
    monkeypatch.setattr(repair_wait, "ADMIN_REPAIR_WAIT_S", WAIT_S)
    monkeypatch.setattr(repair_wait, "READ_REPAIR_WAIT_S", WAIT_S)
    with damaged_topic(tmp_path, lying=False) as damaged:
        reports = repair_after_reports(damaged, tmp_path)
        messages = READERS[reader](damaged)
        assert [message.body for message in messages] == [
            b"intact %03d " % number * 20 for number in range(len(damaged.bodies))
        ]
        assert reports


def read_letters(damaged: DamagedTopic, monkeypatch: pytest.MonkeyPatch) -> list[MessageExt]:
    """Read the damaged topic as the dead-letter topic of a group. Its copies are looked for in the same topic."""
    monkeypatch.setattr(dead_letters, "dlq_topic", lambda group: TOPIC)
    monkeypatch.setattr(dead_letters, "retry_topic", lambda group: TOPIC)
    letters = dead_letters.DeadLetters("g", damaged.routes, damaged.storages, lambda: None)
    monkeypatch.setattr(letters, "_offsets", SimpleNamespace(committed_offset=lambda queue: None))
    return [letter.message for letter in letters.letters(max_messages=1000, replayed=True)]


@pytest.mark.parametrize(
    "reader", ["pull", "browse", "browse backwards", "tail", "query by key", "query by id", "dead letters"]
)
def test_the_answer_to_a_fetch_is_decoded_once(damaged, monkeypatch, reader):
    answers: list[bytes] = []

    def counted(records: bytes) -> Any:
        answers.append(records)
        return find_starts(records)

    monkeypatch.setattr(pull_once, "find_starts", counted)
    assert read_letters(damaged, monkeypatch) if reader == "dead letters" else READERS[reader](damaged)
    assert answers
    assert len(set(map(id, answers))) == len(answers)


def test_dead_letters_are_read_after_their_repair(tmp_path, monkeypatch):
    monkeypatch.setattr(repair_wait, "ADMIN_REPAIR_WAIT_S", WAIT_S)
    monkeypatch.setattr(repair_wait, "READ_REPAIR_WAIT_S", WAIT_S)
    monkeypatch.setattr(dead_letters, "dlq_topic", lambda group: TOPIC)
    monkeypatch.setattr(dead_letters, "retry_topic", lambda group: "nowhere")
    with damaged_topic(tmp_path, lying=False) as damaged:
        reports = repair_after_reports(damaged, tmp_path)
        letters = dead_letters.DeadLetters("g", damaged.routes, damaged.storages, lambda: None)
        monkeypatch.setattr(letters, "_offsets", SimpleNamespace(committed_offset=lambda queue: None))
        found = letters.letters(max_messages=1000)
        assert [letter.message.body[:10] for letter in found] == [b"intact %03d" % at for at in range(len(found))]
        assert len(found) == len(damaged.bodies)
        assert reports
