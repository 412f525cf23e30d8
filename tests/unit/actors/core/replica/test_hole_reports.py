"""Tests of when a master may copy damaged bytes of its log to a slave: only after a wait, and only if no in-sync
replica has the intact bytes."""

from __future__ import annotations

from actors.core.replica.hole_reports import HOLE_WAIT_S, HoleReports

MASTER = 0
SET = frozenset((MASTER, 1, 2))


def test_a_hole_is_copied_only_after_all_in_sync_replicas_lack_its_bytes():
    reports = HoleReports(MASTER, 100.0)
    late_s = 100.0 + HOLE_WAIT_S
    reports.note_lacking(1, 500)
    assert reports.reason_to_wait(500, SET, late_s) == "replica 2 may have the intact bytes"
    reports.note_lacking(2, 600)
    assert reports.reason_to_wait(500, SET, late_s) == "replica 2 may have the intact bytes"
    reports.note_lacking(2, 500)
    assert reports.reason_to_wait(500, SET, late_s) == ""
    assert reports.reason_to_wait(700, SET, late_s) == "replica 1, 2 may have the intact bytes"


def test_a_new_master_waits_for_replicas_that_are_not_back_yet():
    reports = HoleReports(MASTER, 100.0)
    assert "30 s" in reports.reason_to_wait(500, {MASTER}, 100.0)
    assert "1 s" in reports.reason_to_wait(500, {MASTER}, 99.0 + HOLE_WAIT_S)
    assert reports.reason_to_wait(500, {MASTER}, 100.0 + HOLE_WAIT_S) == ""
    assert HoleReports(MASTER, 100.0, wait_s=0.0).reason_to_wait(500, {MASTER}, 100.0) == ""


def test_the_replicas_that_lack_every_hole_are_known():
    reports = HoleReports(MASTER, 100.0)
    assert reports.lackers([]) is None
    assert reports.lackers([500, 600]) == frozenset()
    for replica, hole in ((1, 500), (2, 500), (2, 600)):
        reports.note_lacking(replica, hole)
    assert reports.lackers([500, 600]) == {2}
    assert reports.lackers([500]) == {1, 2}
