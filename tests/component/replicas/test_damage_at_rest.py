"""Tests of damage at rest: bits flip in the logs of stopped replicas, which then start, and the master fails.

Bits flip in each field of a record, in the first, the middle and the last log file. No acknowledged message is lost, no
damaged record is served, and every record with an intact copy is repaired. RAYMQ_DAMAGE_SEED sets the seed.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from raymq.common.errors import StoreCorruptError
from raymq.common.protocol.store import QueuePosition
from storage.message_store import MessageStore
from storage.queue.consume_queue import UNIT_BYTES
from tests.support.history.waiting import eventually
from tests.support.replicas.local_replicas import LocalReplicas, append, settle_append
from tests.support.stores.damage import FIELDS, flip
from tests.support.stores.stores import LOG_FILE_BYTES, make_batch, placed_bodies

pytestmark = pytest.mark.usefixtures("no_flushes")

BODIES = [b"%06d" % number + b"x" * 1000 for number in range(180)]
MORE = [b"after the failover"]
SETTLE_S = 60.0
REPLICAS = range(3)
STORE = {"mapped_file_size_consume_queue_bytes": 1000 * UNIT_BYTES}
"""As with the default settings, a queue file has more units than recovery reads records after a kill."""


@pytest.fixture(scope="module")
def seed() -> int:
    return int(os.environ.get("RAYMQ_DAMAGE_SEED", "15"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Return the directory of a cleanly stopped broker group whose three replicas have BODIES in several log files, and
    the physical offset of each message."""
    root = tmp_path_factory.mktemp("group") / "stopped"
    group = LocalReplicas(root, **STORE)
    group.settle()
    for start in range(0, len(BODIES), 20):
        settle_append(group, make_batch(BODIES[start : start + 20]))
    group.settle()
    places = [int(unit["physical_offset"]) for unit in _units(group.master.any_store)]
    group.end()
    assert len({place // LOG_FILE_BYTES for place in places}) >= 3
    return root, places


def _units(store: MessageStore) -> Sequence[dict[str, int]]:
    queue = store._parts.queues.get_plain("orders", 0)
    assert queue is not None
    return [queue.units(offset, 1)[0] for offset in range(len(BODIES))]


def choose(places: list[int], dice: random.Random) -> dict[int, str]:
    """Return a field to damage for each chosen message: every field once in the first, the middle and the last log
    file."""
    files = sorted({place // LOG_FILE_BYTES for place in places})
    chosen: dict[int, str] = {}
    for file in (files[0], files[len(files) // 2], files[-1]):
        numbers = [number for number, place in enumerate(places) if place // LOG_FILE_BYTES == file]
        chosen |= dict(zip(dice.sample(numbers, len(FIELDS)), FIELDS, strict=True))
    return chosen


def serve(group: LocalReplicas, damage: dict[int, set[int]]) -> int:
    """Read all messages from each replica. A reader gets each message itself or an error, and only a message that was
    damaged on this replica may be an error. Returns the number of errors."""
    errors = 0
    for name, replica in group.replicas.items():
        found = placed_bodies(replica.any_store)[: len(BODIES)]
        assert len(found) == len(BODIES)
        for number, (body, expected) in enumerate(zip(found, BODIES, strict=True)):
            assert body in (expected, None), (name, number)
            assert body is not None or number in damage[name], (name, number)
            errors += body is None
    return errors


def find_by_reports(group: LocalReplicas, damage: dict[int, set[int]]) -> None:
    """Report the messages that cannot be read, as readers of each replica do."""
    for replica in group.replicas.values():
        for number, body in enumerate(placed_bodies(replica.any_store)[: len(BODIES)]):
            if body is None:
                replica.report_damage([QueuePosition("orders", 0, number)])
                assert replica.any_store.reported.settle(SETTLE_S)


def find_by_scrubbers(group: LocalReplicas) -> None:
    """Let each store verify all its files at once."""
    scrubbers = [replica.any_store.scrubber for replica in group.replicas.values()]
    numbers = [scrubber.verify_now() for scrubber in scrubbers]
    for scrubber, number in zip(scrubbers, numbers, strict=True):
        eventually(lambda one=scrubber, end=number: one.status().completed >= end, "verification", SETTLE_S)


def mend(group: LocalReplicas) -> None:
    """Let the Replicators of all slaves repair damage, until there is nothing left to repair."""
    while sum(group.mend(name) for name in sorted(group.replicas)):
        pass


def settle(group: LocalReplicas) -> None:
    """Copy the log until every replica has it. A master does not copy damaged bytes while another replica may have them
    intact, so the Replicators of the other replicas go on."""
    for _ in range(5):
        with suppress(StoreCorruptError):
            group.settle()
            return
        for name in sorted(group.replicas):
            with suppress(StoreCorruptError):
                group.copy(name)
        group.control(2)
    group.settle()


def fail_over(group: LocalReplicas) -> None:
    """Stop the master. Another replica leads, and the former master returns as a slave."""
    former = group.fail_over()
    group.open(former)
    for _ in range(3):
        settle(group)


def check_whole(group: LocalReplicas, bodies: list[bytes]) -> None:
    assert [replica.holes for replica in group.replicas.values()] == [()] * len(group.replicas)
    assert [placed_bodies(replica.any_store) == bodies for replica in group.replicas.values()] == [True] * 3
    logs = {
        b"".join(path.read_bytes() for path in sorted((group.directory(name) / "commitlog").iterdir())).rstrip(b"\0")
        for name in group.names
    }
    assert len(logs) == 1


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("ended", ["cleanly", "killed"])
@pytest.mark.parametrize("away", ["slaves", "all"])
@pytest.mark.parametrize("order", ["scrubbed, then failed over", "failed over, then read"])
def test_damage_at_rest_is_mended_and_nothing_is_lost(
    stopped: tuple[Path, list[int]], tmp_path: Path, seed: int, copies: int, ended: str, away: str, order: str
) -> None:
    print(f"RAYMQ_DAMAGE_SEED={seed}")
    dice = random.Random(f"{seed} {copies} {ended} {away} {order}")
    root, places = stopped
    group_root = tmp_path / "group"
    shutil.copytree(root, group_root)
    chosen = choose(places, dice)
    damage: dict[int, set[int]] = {name: set() for name in REPLICAS}

    def harm(names: Sequence[int]) -> None:
        for number, field in chosen.items():
            for name in dice.sample(names, copies):
                flip(group_root / f"broker-a-{name}", places[number], field)
                damage[name].add(number)
        for name in names:
            if ended == "killed":
                (group_root / f"broker-a-{name}" / "abort").touch()

    if away == "all":
        harm(list(REPLICAS))
        group = LocalReplicas(group_root, **STORE)
    else:
        group = LocalReplicas(group_root, **STORE)
        group.settle()
        record = group.control_state.record
        assert record is not None
        names = [name for name in REPLICAS if name != record.master]
        for name in names:
            group.close(name)
        harm(names)
        for name in names:
            group.open(name)
    try:
        settle(group)
        served = serve(group, damage)
        if order.startswith("scrubbed"):
            find_by_scrubbers(group)
            mend(group)
            check_whole(group, BODIES)
            fail_over(group)
        else:
            fail_over(group)
            serve(group, damage)
            find_by_reports(group, damage)
            find_by_scrubbers(group)
            mend(group)
        check_whole(group, BODIES)
        append(group, MORE)
        check_whole(group, BODIES + MORE)
        flips = sum(map(len, damage.values()))
        print(f"{flips} bits flipped, {served} records refused, all mended, 0 of {len(BODIES)} messages lost")
    finally:
        group.end()
