"""Tests of misfits: records whose queue offsets contradict the other records of their queue. The tests check which
misfits recovery treats as changed by damage, and which it trusts."""

from __future__ import annotations

import pytest

from raymq.records.format.encode import ProducerSequence
from storage.dispatch.multi_dispatch import QueueUnit
from storage.log.holes import PLACE_REASON
from storage.recovery.claims import PlaceClaim, Survey, one_bit_away
from storage.recovery.misfits import Misfits

SIZE = 100


def claims_of(text: str) -> list[PlaceClaim]:
    """Return one PlaceClaim (the queue and offset that a record names) per word of `text`. A word is a queue's letter
    and an offset.

    Letters stand for queue ids from 0 on. Capital letters belong to another topic. "?" stands for bytes without
    meaning.
    """
    found = []
    for position, word in enumerate(text.split()):
        if word != "?":
            topic = "pays" if word[0].isupper() else "orders"
            place = QueueUnit((topic, ord(word[0].lower()) - ord("a")), int(word[1:]))
            found.append(PlaceClaim(position * SIZE, SIZE, place))
    return found


def changes(
    text: str,
    *,
    bases: str = "",
    new_queues_begin_at: int | None = None,
    units: dict[int, str] | None = None,
    sequences: dict[int, tuple[str, int]] | None = None,
) -> dict[int, str | None]:
    """Return the records that recovery treats as changed by damage. `text` describes the records of a log, one word per
    record. The result maps the number of each changed record to the queue and offset that the record should name. The
    value is None if these are unknown.

    `units`: by record number, the queue and offset of a consume-queue entry (unit) that points to the record.
    `sequences`: by record number, the record's producer and sequence number.
    """
    unknown = [position * SIZE for position, word in enumerate(text.split()) if word == "?"]
    survey = Survey(claims_of(text), set(), unknown, 0, len(text.split()) * SIZE)
    known = {(claim.place, row * SIZE) for row, word in (units or {}).items() for claim in claims_of(word)}
    sent = {row: ProducerSequence(producer, 0, number) for row, (producer, number) in (sequences or {}).items()}
    misfits = Misfits(
        survey,
        {claim.place.key: claim.place.queue_offset for claim in claims_of(bases)},
        new_queues_begin_at,
        lambda place, physical_offset, size: size == SIZE and (place, physical_offset) in known,
        raw_topic,
        lambda claim: sent.get(claim.physical_offset // SIZE),
    )
    found = misfits.find([claim.physical_offset for claim in survey.claims], lambda _: False)
    assert all(change.reason.startswith(PLACE_REASON) for change in found.values())
    return {offset // SIZE: _word(change.place) if change.is_sure else None for offset, change in found.items()}


def _word(place: QueueUnit | None) -> str | None:
    if place is None:
        return None
    letter = chr(ord("a") + place.key[1])
    return f"{letter.upper() if place.key[0] == 'pays' else letter}{place.queue_offset}"


GENUINE = {
    "ordinary": "a5 b7 a6 a7 b8 A0 A1",
    "a topic that was deleted and made anew": "a5 a6 a0 a1 a2 b3",
    "a topic of one message, made anew twice": "a0 a0 a0",
    "a topic of one message, made anew, that goes on": "a0 b4 a0 a1 a2 b5",
    "a jump ahead": "a5 a6 a9 a10 b3 b4",
    "a jump ahead at the end": "b4 a5 a6 a9 b5",
    "unknown bytes, and a queue that lacks an offset": "a5 a6 ? a8 a9",
    "a queue that begins in its middle": "a5 a6 c77 c78",
}


@pytest.mark.parametrize("name", GENUINE)
def test_records_that_may_be_genuine_are_trusted(name: str) -> None:
    assert changes(GENUINE[name]) == {}


PROVEN = {
    "an offset one bit too high": ("a8 a9 a14 a11 a12", {2: "a10"}),
    "an offset too high by one": ("a8 a9 a11 a11 a12", {2: "a10"}),
    "an offset one bit too low": ("a9 a10 a3 a12 a13", {2: "a11"}),
    "an offset too low by one": ("a9 a10 a10 a12 a13", {2: "a11"}),
    "another queue, whose offset is far off": ("a9 b20 b10 a11 b21 a12", {2: "a10"}),
    "another queue that has come to its end": ("a9 b20 b10 a11 a12", {2: "a10"}),
    "the last record of a queue, in the middle of another": ("a9 b20 b10 b21", {2: "a10"}),
    "another queue that expects just this offset": ("b8 b9 a9 b10 a11 b10 b11", {3: "a10"}),
    "another queue that expects just this offset, and ends": ("b9 a9 b10 a11 a12", {2: "a10"}),
    "another queue that does not exist": ("a9 c10 a11 a12", {1: "a10"}),
    "two changed records": ("a8 a9 a14 b20 b11 b21 a12 a13", {2: "a10", 4: "a11"}),
}


@pytest.mark.parametrize("name", PROVEN)
def test_neighbours_prove_the_place_of_a_changed_record(name: str) -> None:
    text, found = PROVEN[name]
    assert changes(text) == found


def raw_topic(claim: PlaceClaim) -> bytes:
    return claim.place.key[0].encode()


def test_a_changed_topic_is_proven_by_the_topic_that_lacks_the_record() -> None:
    claims = claims_of("a9 a10 a11 a12")
    topic = next(place.key[0] for place in one_bit_away(claims[1].place, b"orders") if place.key[0] != "orders")
    claims[1] = claims[1]._replace(place=QueueUnit((topic, 0), 10))
    misfits = Misfits(Survey(claims, set(), [], 0, 400), {}, None, lambda *_: False, raw_topic, lambda _: None)
    found = misfits.find([SIZE], lambda _: False)
    assert {offset: change.place for offset, change in found.items()} == {SIZE: QueueUnit(("orders", 0), 10)}


def test_the_first_record_of_a_queue_is_found_by_the_offset_at_which_queues_begin() -> None:
    assert changes("c10 a11 a12", bases="a10") == {0: "a10"}
    assert changes("b0 b0 a1 b1", new_queues_begin_at=0, units={0: "a0"}) == {0: "a0"}
    assert changes("a0 a1 a2 a3 a4 c5", new_queues_begin_at=0) == {5: "a5"}


def test_neither_of_two_records_that_may_both_be_changed_is_trusted() -> None:
    text = "a9 b9 b10 b10 a11 b11"
    assert changes(text) == {2: None, 3: None}
    assert changes(text, units={2: "a10"}) == {2: "a10"}
    assert changes(text, units={3: "a10"}) == {3: "a10"}
    # Record c2 may be record a2 with a damaged queue id, or record c0 with a damaged offset. So its queue and offset
    # are unknown.
    assert changes("a0 a1 c2", new_queues_begin_at=0) == {2: None}


def test_a_record_that_fits_nowhere_is_damaged() -> None:
    assert changes("a9 a500 a10 a11") == {1: None}
    assert changes("a9 a3 a10 a11") == {1: None}


def test_a_unit_decides_about_the_last_record_of_a_queue() -> None:
    assert changes("a9 a10 a15") == {}
    assert changes("a9 a10 a15", units={2: "a11"}) == {2: "a11"}
    assert changes("a9 b4 a10 b11", units={3: "a11"}) == {3: "a11"}


def test_a_producer_decides_if_no_unit_does() -> None:
    text = "a9 b9 b10 b10 a11 b11"
    assert changes(text, sequences={0: ("p", 3), 1: ("q", 3), 2: ("p", 4), 3: ("q", 4)}) == {2: "a10"}
    assert changes(text, sequences={0: ("p", 3), 1: ("q", 3), 2: ("q", 4), 3: ("p", 4)}) == {3: "a10"}
    assert changes(text, sequences={0: ("p", 3), 1: ("p", 3), 2: ("p", 4), 3: ("p", 4)}) == {2: None, 3: None}
    # Two records name offset 10 of queue b, so one of them is damaged. Its true place is offset 10 of queue a. Producer
    # p has one earlier message in queue a and one in queue b, so its sequence numbers do not show which record is
    # damaged. Messages of other producers lie between p's messages.
    text = "a9 b8 b9 b10 b10 a11 b11"
    sequences = {0: ("p", 3), 1: ("p", 3), 2: ("q", 3), 3: ("r", 5), 4: ("p", 4)}
    assert changes(text, sequences=sequences) == {3: None, 4: None}
    assert changes("a9 a10 a15", sequences={1: ("p", 7), 2: ("p", 8)}) == {2: "a11"}
    assert changes("a9 a10 a15", sequences={1: ("p", 7), 2: ("p", 9)}) == {}
    # The queue offsets 11 and 14 differ in two bits. A damaged bit can change only one of them, so it does not explain
    # why the record names 14.
    assert changes("a9 a10 a14", sequences={1: ("p", 7), 2: ("p", 8)}) == {}


def test_sequences_in_a_recreated_topic_prove_no_change() -> None:
    assert changes("a2 a3 a0", sequences={0: ("p", 2), 1: ("p", 3), 2: ("p", 4)}) == {}
    assert changes("a0 a0 a0", sequences={0: ("p", 2), 1: ("p", 3), 2: ("p", 4)}) == {}


def test_units_that_rocketmq_put_at_wrong_offsets_do_not_make_a_record_damaged() -> None:
    """A record is not reported as damaged if only its consume-queue entry (unit) is at a wrong offset. After a gap,
    RocketMQ appends an entry at the queue's end, so all later entries have wrong offsets."""
    assert changes("a7 a10 a11 a12", units={1: "a8", 2: "a9", 3: "a10"}) == {}


def test_a_queue_of_a_deleted_topic_may_begin_in_its_middle() -> None:
    """The records of a deleted topic count as intact even if a queue begins at an offset other than 0. Such a queue
    exists if a replica recorded the topic's deletion too late."""
    claims = claims_of("a0 a1 c0 a0 c1 c2 a1")
    claims[:3] = [claim._replace(is_chained=False) for claim in claims[:3]]
    survey = Survey(claims, set(), [], 0, len(claims) * SIZE)
    misfits = Misfits(survey, {}, 0, lambda *_: False, raw_topic, lambda _: None)
    assert misfits.find([claim.physical_offset for claim in claims], lambda _: False) == {}


def test_a_unit_of_another_queue_s_file_does_not_make_a_record_damaged() -> None:
    """If a user swaps the files of two consume queues, their entries (units) do not make intact records count as
    damaged."""
    assert changes("a0 b0 a1 b1 a2 b2", new_queues_begin_at=0, units={0: "b0", 1: "a0", 4: "b2", 5: "a2"}) == {}
