"""Test of the key index over a cut of the log: the store builds the index again, and a cut is no damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.history.waiting import eventually
from tests.support.replicas.local_replicas import LocalReplicas, settle_append
from tests.support.stores.stores import bodies_of, make_batch

pytestmark = pytest.mark.usefixtures("no_flushes")


def test_a_cut_is_not_reported_as_damage_of_the_index(tmp_path: Path):
    group = LocalReplicas(tmp_path, 2)
    try:
        group.settle()
        settle_append(group, make_batch([b"kept"]))
        group.settle()
        group.master.start_append([make_batch([b"lost"])])
        old = group.fail_over()
        settle_append(group, make_batch([b"new"]))
        # After its restart the old master indexes all records of its log, until it follows the new master.
        store = group.open(old).any_store
        index = store._index
        assert index is not None
        eventually(lambda: index.position == store.log.end_offset, "the index of all records")
        group.settle()
        follower = group.replicas[old].any_store
        assert bodies_of(follower) == [b"kept", b"new"]
        assert follower.status().damaged_files == ()
    finally:
        group.end()
