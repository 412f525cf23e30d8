"""Tests of opening a directory of store files, which all have the same size, after a power cut."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from storage.files.file_names import list_starts
from tests.support.stores.power import LossyDisk

SIZE = 400


@pytest.mark.parametrize(
    ("sizes", "left"),
    [((SIZE, 0, SIZE), [0]), ((SIZE, SIZE, 0), [0, SIZE]), ((SIZE, 7, 0), [0])],
    ids=["an empty file in the middle", "an empty last file", "both wrong"],
)
def test_a_deleted_file_does_not_come_back_with_the_next_power_cut(tmp_path, sizes: Sequence[int], left: list[int]):
    """The first start deletes a queue file, and then the power is cut. The file must not reappear at the second start.
    A second start that finds the marker of a clean stop would not repair the queue."""
    queue = tmp_path / "0" / "queue"
    queue.mkdir(parents=True)
    for number, size in enumerate(sizes):
        (queue / f"{number * SIZE:020d}").write_bytes(bytes(size))
    for seed in range(20):
        lossy = LossyDisk(queue.parent, Random(seed), lose_at=-1, on_loss=lambda: None)
        with lossy.installed():
            found = list_starts(queue, SIZE, remedy="", repair=True)
            lossy.lose_now()
        after = tmp_path / f"after-{seed}"
        after.mkdir()
        lossy.write_image(after)
        assert found == left
        assert list_starts(after / "queue", SIZE, remedy="") == left
        for number, size in enumerate(sizes):
            (queue / f"{number * SIZE:020d}").write_bytes(bytes(size))
