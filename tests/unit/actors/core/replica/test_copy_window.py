"""Tests of a Replicator's progress: when it requests the next chunk of the master's log, and when it acknowledges the
slave's copy."""

from __future__ import annotations

from actors.core.replica.copy_window import CHUNKS_MAX, SECOND_MIN_BYTES, CopyWindow
from actors.core.replica.orders import Copied


def asked(position: int = 100) -> CopyWindow:
    window = CopyWindow(position)
    assert window.may_ask
    assert not window.must_tell
    window.told(asked=True)
    return window


def test_one_chunk_is_asked_for_at_a_time():
    window = asked()
    assert not window.may_ask
    window.read(50)
    assert window.may_ask
    assert (window.next_offset, window.acked_offset) == (150, 100)


def test_no_more_chunks_are_asked_for_than_may_be_on_their_way():
    window = asked()
    for number in range(CHUNKS_MAX):
        window.read(10)
        assert window.under_way == number + 1
        assert window.may_ask == (number + 1 < CHUNKS_MAX)
        if window.may_ask:
            window.told(asked=True)
    window.copied(Copied(110, 110, 10))
    assert window.may_ask
    assert window.next_offset == 100 + 10 * CHUNKS_MAX


def test_a_copied_chunk_is_acknowledged_with_the_next_request():
    window = asked()
    window.read(10)
    window.copied(Copied(110, 110, 10))
    assert window.may_ask
    assert not window.must_tell
    window.told(asked=True)
    assert not window.must_tell


def test_a_copied_chunk_is_acknowledged_separately_while_a_request_waits():
    window = asked()
    window.read(10)
    window.told(asked=True)
    window.copied(Copied(110, 110, 10))
    assert not window.may_ask
    assert window.must_tell
    window.told(asked=False)
    assert not window.must_tell
    assert window.is_asked


def test_while_a_chunk_is_on_its_way_the_next_one_is_to_be_worth_it():
    window = asked()
    window.read(0)
    assert window.min_bytes == 1
    window.told(asked=True)
    window.read(10)
    assert window.min_bytes == SECOND_MIN_BYTES
    window.copied(Copied(100, 100, 0))
    window.copied(Copied(110, 110, 10))
    assert window.min_bytes == 1


def test_an_empty_chunk_counts_as_in_flight_and_needs_no_report():
    window = asked()
    window.read(0)
    window.told(asked=True)
    window.copied(Copied(100, 100, 0))
    assert window.under_way == 0
    assert not window.must_tell


def test_an_acknowledgement_never_goes_back():
    window = asked()
    window.read(10)
    window.copied(Copied(110, 110, 10))
    window.told(asked=True)
    window.read(10)
    window.copied(Copied(120, 105, 10))
    assert window.acked_offset == 110
