"""Tests of the status of one message in a consumer group, with one test for each status."""

from __future__ import annotations

import pytest

from raymq.client.admin.track import MessageTrack, TrackState, Tries, judge


@pytest.mark.parametrize(
    ("committed", "tries", "wanted", "state", "retries"),
    [
        (8, None, True, TrackState.CONSUMED, 0),
        (8, None, None, TrackState.CONSUMED, 0),
        (7, None, True, TrackState.NOT_YET, 0),
        (7, None, None, TrackState.NOT_YET, 0),
        (8, None, False, TrackState.FILTERED, 0),
        (None, None, True, TrackState.UNKNOWN, 0),
        (8, Tries(2), True, TrackState.RETRYING, 2),
        (8, Tries(2, committed=True), True, TrackState.CONSUMED, 2),
        (8, Tries(3, dead=True), True, TrackState.DEAD, 3),
        (8, Tries(3, dead=True), False, TrackState.DEAD, 3),
    ],
)
def test_each_state_has_its_reason(
    committed: int | None, tries: Tries | None, wanted: bool | None, state: TrackState, retries: int
) -> None:
    track = judge("billing", offset=7, committed=committed, tries=tries, wanted=wanted)
    assert (track.group, track.state, track.retries) == ("billing", state, retries)
    assert isinstance(track, MessageTrack)
    assert track.detail
