"""Tests of the list and the export of damaged log ranges: over a real store with damaged records."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.replica.sole_replica import SoleReplica
from raymq.client.admin.admin import Admin
from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError
from raymq.common.protocol.route import BrokerData
from raymq.common.protocol.store import QueueSpan
from tests.support.stores.damage import flip
from tests.support.stores.stores import make_batch, open_store

pytestmark = pytest.mark.usefixtures("no_flushes")

BROKERS = {"broker-a": BrokerData("c", "broker-a", {0: "storage-a-0", 1: "storage-a-1"})}


@pytest.fixture
def store(tmp_path: Path) -> Any:
    store = open_store(tmp_path / "store")
    bodies = [b"%03d" % number + b"x" * 50 for number in range(40)]
    places = [one.physical_offset for body in bodies for one in store.append([make_batch([body])])]
    for number in (10, 11, 30):
        flip(tmp_path / "store", places[number], "body")
    store.inspector.inspect(0, 1 << 40)
    yield SimpleNamespace(store=store, places=places, root=tmp_path / "store")
    store.close()


@pytest.fixture
def admin(store: Any) -> Admin:
    """Return an Admin of a group whose replica 0 has the damaged store. Replica 1 does not answer."""

    def control(method: str, *arguments: Any, timeout_s: float) -> Any:
        replica = SoleReplica(store.store)
        return {"damage": replica.damage, "damaged_bytes": store.store.mender.damaged_bytes}[method](*arguments)

    def get(name: str) -> Any:
        return SimpleNamespace(control=control if name == "storage-a-0" else away)

    def away(method: str, *arguments: Any, timeout_s: float) -> Any:
        raise InvalidArgumentError("not asked") if method != "damage" else ServiceNotAvailableError("no such actor")

    return Admin(SimpleNamespace(brokers=lambda: BROKERS), SimpleNamespace(get=get))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raymq.client.admin.upkeep.damage.ADMIN_TIMEOUT_S", 0.0)


def test_each_damaged_range_is_listed_with_its_messages(admin: Admin, store: Any) -> None:
    found = admin.damage()
    assert list(found) == ["storage-a-0", "storage-a-1"]
    first, second = found["storage-a-0"].ranges
    assert (first.offset, first.size) == (store.places[10], store.places[12] - store.places[10])
    assert first.spans == (QueueSpan("orders", 0, 10, 12),)
    assert second.spans == (QueueSpan("orders", 0, 30, 31),)
    assert first.lost
    assert "checksum" in first.reason
    assert (found["storage-a-0"].found, found["storage-a-0"].repaired) == (3, 0)
    assert found["storage-a-1"].error == "no such actor"
    with pytest.raises(InvalidArgumentError, match="broker-b"):
        admin.damage("broker-b")


def test_the_damaged_bytes_are_exported_as_they_are_on_disk(admin: Admin, store: Any, tmp_path: Path) -> None:
    found = admin.damage("broker-a")
    paths = [Path(path) for path in admin.export_damage(str(tmp_path / "damage"), found)]
    log = b"".join(path.read_bytes() for path in sorted((store.root / "commitlog").iterdir()))
    ranges = found["storage-a-0"].ranges
    assert [path.read_bytes() for path in paths] == [
        log[one.offset : one.end_offset] for one in store.store.mender.holes
    ]
    listed = json.loads((tmp_path / "damage" / "damage.json").read_text())
    assert [(one["store"], one["file"], one["offset"]) for one in listed] == [
        ("storage-a-0", path.name, one.offset) for path, one in zip(paths, ranges, strict=True)
    ]
    with pytest.raises(FileExistsError):
        admin.export_damage(str(tmp_path / "damage"), found)


def test_a_range_that_was_repaired_is_not_exported(admin: Admin, store: Any, tmp_path: Path) -> None:
    found = admin.damage("broker-a")
    flip(store.root, store.places[30], "body")
    hole = store.store.mender.holes[1]
    store.store.mender.mend(hole.offset, bytes(store.store._parts.reader.log_bytes(hole.offset, hole.end_offset)))
    assert len(admin.export_damage(str(tmp_path / "damage"), found)) == 1
    assert admin.damage("broker-a")["storage-a-0"].repaired == 1


def test_only_damaged_bytes_are_returned(store: Any) -> None:
    hole = store.store.mender.holes[0]
    for offset, size in ((0, 10), (hole.offset, 0), (hole.offset, hole.size + 1), (hole.offset - 1, 2)):
        with pytest.raises(InvalidArgumentError):
            store.store.mender.damaged_bytes(offset, size)
