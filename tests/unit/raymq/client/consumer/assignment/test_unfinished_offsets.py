"""Tests of how the offset to commit is computed from the completed messages (spec/messaging.md §5.5)."""

from __future__ import annotations

from raymq.client.consumer.assignment.unfinished_offsets import UnfinishedOffsets


def test_fact_33_the_offset_to_commit_is_the_smallest_that_is_not_finished():
    offsets = UnfinishedOffsets()
    offsets.add([5, 6, 7])
    assert offsets.remove([6]) == 5
    assert offsets.remove([5]) == 7
    assert offsets.remove([7]) == 8
    assert offsets.remove([7]) == -1


def test_the_span_is_from_the_first_unfinished_to_the_last_that_was_fetched():
    offsets = UnfinishedOffsets()
    assert offsets.span == 0
    offsets.add([5, 6, 100])
    assert offsets.span == 95
    offsets.remove([5])
    assert offsets.span == 94
    offsets.remove([6, 100])
    assert offsets.span == 0
