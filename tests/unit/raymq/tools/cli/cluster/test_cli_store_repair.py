"""Tests of `raymq store repair` with a fake Admin: the list of damaged ranges, and the export of their bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raymq.common.protocol.store import DamagedRange, QueueSpan, StoreDamage


class Stores:
    """Fake Admin of stores with damage."""

    def __init__(self) -> None:
        self.damaged: dict[str, StoreDamage] = {}

    def damage(self, broker_name: str | None = None) -> dict[str, StoreDamage]:
        return self.damaged

    def export_damage(self, directory: str, damage: dict[str, StoreDamage]) -> list[str]:
        return [f"{directory}/{name}-{one.offset}" for name, store in damage.items() for one in store.ranges]


@pytest.fixture
def admin() -> Stores:
    return Stores()


SPANS = (QueueSpan("orders", 0, 5, 6), QueueSpan("orders", 1, 7, 10))


def test_damaged_ranges_are_listed_with_their_messages(run: Any, admin: Stores) -> None:
    admin.damaged = {
        "storage-broker-a-0": StoreDamage((DamagedRange(4096, 245, "flipped", SPANS, lost=True),), 2, 1, 300),
        "storage-broker-a-1": StoreDamage(error="gone"),
    }
    result = run("store", "repair", code=1)
    assert "lost" in result.output
    assert "storage-broker-a-1 does not answer: gone" in result.output
    value = json.loads(run("store", "repair", "--json", code=1).stdout)
    [listed] = value["ranges"]
    assert list(listed.values()) == [
        *("storage-broker-a-0", "lost", 4096, 245, "orders:0 at 5, orders:1 at 7-9", "flipped")
    ]
    assert list(value["stores"][0].values()) == ["storage-broker-a-0", 1, 1, 2, 1, 300]


def test_damaged_bytes_are_exported(run: Any, admin: Stores, tmp_path: Path) -> None:
    admin.damaged = {"storage-broker-a-0": StoreDamage((DamagedRange(4096, 245, "flipped"),))}
    result = run("store", "repair", "--export", str(tmp_path), code=1)
    assert "in repair" in result.output
    assert "1 damaged ranges were written" in result.output


def test_a_store_without_damage_is_no_failure(run: Any, admin: Stores) -> None:
    admin.damaged = {"storage-broker-a-0": StoreDamage((), 2, 2, 300)}
    assert "300" in run("store", "repair").output
