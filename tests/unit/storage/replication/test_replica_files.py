"""Tests of the identity of a store directory. The tests reopen the directory, or lose files in it, and check if its
identity stays or changes."""

from __future__ import annotations

import pytest

from raymq.common.errors import StoreCorruptError
from storage.files.config_files import ConfigFiles
from storage.replication.epochs import ReplicaMembers, SyncStateSet
from storage.replication.replica_files import MEMBERS_FILE, SET_FILE, ReplicaFiles


def test_an_id_stays_with_its_directory_and_each_opening_counts(tmp_path):
    first = ReplicaFiles(ConfigFiles(tmp_path))
    second = ReplicaFiles(ConfigFiles(tmp_path))
    assert first.store_id == second.store_id
    assert (first.incarnation, second.incarnation) == (1, 2)


def test_another_directory_has_another_id(tmp_path):
    assert ReplicaFiles(ConfigFiles(tmp_path / "a")).store_id != ReplicaFiles(ConfigFiles(tmp_path / "b")).store_id


def test_the_newest_set_is_remembered(tmp_path):
    files = ReplicaFiles(ConfigFiles(tmp_path))
    assert files.sync_state_set is None
    newer = SyncStateSet(2, 7, {0: "x", 1: "y"})
    files.note_set(newer)
    files.note_set(SyncStateSet(1, 99, {0: "x"}))
    assert ReplicaFiles(ConfigFiles(tmp_path)).sync_state_set == newer


def test_a_set_that_cannot_be_understood_is_an_error(tmp_path):
    config = ConfigFiles(tmp_path)
    config.write(SET_FILE, '{"epoch": 1}')
    with pytest.raises(StoreCorruptError, match="not contain a sync-state set"):
        ReplicaFiles(config)


def test_the_newest_members_are_remembered(tmp_path):
    files = ReplicaFiles(ConfigFiles(tmp_path))
    assert files.members is None
    newer = ReplicaMembers(
        4, frozenset({0, 3}), frozenset({3}), frozenset({0}), frozenset({3}), frozenset({1}), True, 2
    )
    files.note_members(newer)
    files.note_members(ReplicaMembers(3, frozenset({0})))
    assert ReplicaFiles(ConfigFiles(tmp_path)).members == newer


def test_members_that_cannot_be_understood_are_an_error(tmp_path):
    config = ConfigFiles(tmp_path)
    config.write(MEMBERS_FILE, '{"version": 1}')
    with pytest.raises(StoreCorruptError, match="not contain the replicas of a broker group"):
        ReplicaFiles(config)
