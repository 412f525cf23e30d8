"""Tests that a storage actor's process ends after its disk has failed."""

from __future__ import annotations

import threading

import pytest

from actors.replica.failed_disk import ANSWER_S, RESTART_INTERVAL_S, FailedDisk, end_delay_s


@pytest.mark.parametrize(
    ("age_s", "delay_s"),
    [
        (0.0, RESTART_INTERVAL_S),
        (RESTART_INTERVAL_S - 5.0, 5.0),
        (RESTART_INTERVAL_S, ANSWER_S),
        (86_400.0, ANSWER_S),
    ],
)
def test_an_old_process_ends_soon_and_a_young_one_not_before_its_time(age_s: float, delay_s: float) -> None:
    assert end_delay_s(age_s) == delay_s


def test_the_process_ends_once_however_often_the_failure_is_noted() -> None:
    now_s = 1000.0
    waited: list[float] = []
    ended = threading.Semaphore(0)
    failed = FailedDisk("storage-broker-a-0", end=ended.release, clock_s=lambda: now_s, wait=waited.append)
    now_s += 3.0
    for _ in range(5):
        failed.note_failure()
    assert ended.acquire(timeout=30.0)
    assert not ended.acquire(timeout=0.05)
    assert waited == [RESTART_INTERVAL_S - 3.0]
