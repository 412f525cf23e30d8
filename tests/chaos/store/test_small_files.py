"""Damages every small file of a stopped store, one file and one fault at a time, then opens the store.

No fault loses a message or a text of `config/`, and no fault makes the store delete bytes. RAYMQ_DAMAGE_SEED sets the
seed of the flipped bits.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from raymq.common.protocol.store import Hole
from storage.files.damage import DamageNotes
from storage.log.holes import HoleTable
from tests.support.stores.damage import FAULTS, damaged_bytes_are_kept, flip, harm, small_files
from tests.support.stores.stores import LOG_FILE_BYTES, intact_bodies, make_batch, open_store

pytestmark = pytest.mark.usefixtures("no_flushes")

BODIES = [b"%04d" % number + b"x" * 900 for number in range(200)]
HOLE_AT = 20
TEXTS = {
    "topics.json": '{"topicConfigTable": {"orders": {"attributes": {}}}, "queueOffset": 3}',
    "subscriptionGroup.json": '{"subscriptionGroupTable": {}, "queueOffset": 3}',
    "consumerOffset.json": '{"offsetTable": {"orders@g": {"0": 17}}, "queueOffset": 3}',
    "brokerStatePosition.json": '{"queueOffset": 3}',
    "closedTopics.json": '["gone"]',
    "liveSettings.json": '{"store.file_reserved_time_hours": 480}',
    "retentionHolds.json": '{"RAYMQ_BROKER_STATE": {"0": 1}}',
}
OTHER_FILES = {"lock", "reserve", "fatal", "abort"}
"""Files without content that counts."""
REBUILT = {"checkpoint", "dedup", "dedup.bak", "dayTotals.json"}
"""Files whose content recovery takes from the log, or that only count: these files may change."""


@pytest.fixture(scope="module")
def seed() -> int:
    return int(os.environ.get("RAYMQ_DAMAGE_SEED", random.SystemRandom().randrange(1_000_000)))


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a stopped store, and an older copy of it. The newer store has more messages and newer texts."""
    root = tmp_path_factory.mktemp("store") / "newest"
    older = root.with_name("older")
    store = open_store(root)
    for name in TEXTS:
        store.write_config(name, "{}")
    for body in BODIES[:100]:
        [result] = store.append([make_batch([body], producer=("producer", 1, BODIES.index(body)))])
        if body == BODIES[HOLE_AT]:
            hole_at = result.physical_offset
    store.topics.delete("no topic")
    store.close()
    shutil.copytree(root, older)
    flip(root, hole_at, "body")
    store = open_store(root)
    for body in BODIES[100:]:
        store.append([make_batch([body], producer=("producer", 1, BODIES.index(body)))])
    for name, text in TEXTS.items():
        store.write_config(name, text)
    size = len(make_batch([BODIES[HOLE_AT]]).records)
    store.close()
    HoleTable(root, DamageNotes()).replace([Hole(hole_at, size, "the body is damaged")], LOG_FILE_BYTES)
    return root, older


def check(root: Path, where: str) -> None:
    expected: list[bytes | None] = list(BODIES)
    expected[HOLE_AT] = None
    for opened in range(2):
        store = open_store(root)
        try:
            assert intact_bodies(store) == expected, where
            for file, text in TEXTS.items():
                assert store.read_config(file) == text, where
            more = b"more %d" % opened
            [result] = store.append([make_batch([more])])
            assert result.queue_offset == len(expected), where
            expected.append(more)
            [repeat] = store.append([make_batch([BODIES[-1]], producer=("producer", 1, len(BODIES) - 1))])
            assert repeat.duplicate, where
        finally:
            store.close()


NAMES = {
    *(f"config/{name}{copy}" for name in TEXTS for copy in ("", ".bak")),
    *("holes", "holes.bak", "index.sums", "index.sums.bak", "checkpoint", "dedup"),
}
"""Some of the files that the store has."""


@pytest.mark.parametrize("fault", FAULTS)
def test_no_damage_to_a_small_file_loses_or_deletes_anything(
    versions: tuple[Path, Path], tmp_path: Path, seed: int, fault: str
) -> None:
    newest, older = versions
    print(f"RAYMQ_DAMAGE_SEED={seed}")
    names = [name for name in small_files(newest) if name not in OTHER_FILES]
    assert set(names) >= NAMES
    for number, name in enumerate(names):
        root = tmp_path / f"{number}"
        shutil.copytree(newest, root)
        bytes_before = harm(root / name, fault, older / name, random.Random(f"{seed} {name} {fault}"))
        check(root, f"{name}: {fault}, RAYMQ_DAMAGE_SEED={seed}")
        assert name in REBUILT or damaged_bytes_are_kept(root / name, fault, bytes_before), name
        shutil.rmtree(root)
