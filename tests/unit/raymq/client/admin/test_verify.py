"""Tests of the calls that verify stores: over restarts, with repairs by other replicas, and with a store that does not
answer. The storage actors are fakes, and a fake scrubber needs three looks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raymq.client.admin.upkeep import verify
from raymq.client.admin.upkeep.verify import VerifyAdmin
from raymq.common.errors import InvalidArgumentError, ServiceNotAvailableError
from raymq.common.protocol.store import Hole, ScrubStatus, StoreVerification

HOLE = Hole(1000, 443, "the body does not match")
STEPS = 3


class FakeStorage:
    """Storage actor whose verification takes STEPS looks. `holes` exist for `repaired_after` looks after its end."""

    def __init__(self, repaired_after: int | None = 0) -> None:
        self.completed, self.step, self.full_speed = 0, 0, False
        self.calls: list[str] = []
        self.repaired_after, self.looks_after = repaired_after, 0
        self.restart_at: int | None = None
        self.is_away = False

    def control(self, method: str, timeout_s: float) -> Any:
        self.calls.append(method)
        if self.is_away:
            raise ServiceNotAvailableError("it is away")
        if method == "verify":
            self.full_speed, self.step = True, 0
            return self.completed + 1
        if self.full_speed:
            self.step += 1
            if self.step == self.restart_at:
                self.full_speed, self.restart_at = False, None
            elif self.step == STEPS:
                self.completed, self.full_speed = self.completed + 1, False
        elif self.completed:
            self.looks_after += 1
        damaged = self.completed and (self.repaired_after is None or self.looks_after < self.repaired_after)
        scrub = ScrubStatus(
            running=self.full_speed,
            full_speed=self.full_speed,
            completed=self.completed,
            checked_bytes=self.step * 10,
            total_bytes=STEPS * 10,
        )
        return StoreVerification(scrub, (HOLE,) if damaged else ())


@pytest.fixture
def stores() -> dict[str, FakeStorage]:
    return {f"storage-broker-{group}-{replica}": FakeStorage() for group in "ab" for replica in (0, 1)}


@pytest.fixture
def admin(stores: dict[str, FakeStorage], monkeypatch: pytest.MonkeyPatch) -> VerifyAdmin:
    monkeypatch.setattr(verify, "REPAIR_WAIT_S", 60.0)
    monkeypatch.setattr(verify, "ADMIN_TIMEOUT_S", 0.0)
    monkeypatch.setattr(verify, "VERIFY_POLL_S", 0.0)
    brokers = {
        f"broker-{group}": SimpleNamespace(storages={0: f"storage-broker-{group}-1", 1: f"storage-broker-{group}-0"})
        for group in "ab"
    }
    routes: Any = SimpleNamespace(brokers=lambda: brokers)
    storages: Any = SimpleNamespace(get=lambda name: stores[name])
    return VerifyAdmin(routes, storages)


def test_the_state_of_every_replica_is_read_without_a_change(admin, stores):
    found = admin.verification()
    assert list(found) == sorted(stores)
    assert {one.broker for one in found.values()} == {"broker-a", "broker-b"}
    assert all(store.calls == ["verification"] for store in stores.values())
    assert list(admin.verification("broker-b")) == ["storage-broker-b-0", "storage-broker-b-1"]


def test_an_unknown_broker_group_is_refused(admin):
    for call in (admin.verification, admin.verify_stores):
        with pytest.raises(InvalidArgumentError, match="broker-c"):
            call("broker-c")


def test_all_stores_are_verified_and_the_progress_is_told(admin, stores):
    told: list[tuple[int, int]] = []
    found = admin.verify_stores(on_progress=lambda *both: told.append(both))
    assert all(one.scrub.completed == 1 and not one.lost and not one.error for one in found.values())
    assert all(store.calls.count("verify") == 1 for store in stores.values())
    assert told == [(40, 120), (80, 120), (120, 120)]


def test_repairs_by_other_replicas_are_waited_for(admin, stores):
    stores["storage-broker-a-1"].repaired_after = 5
    found = admin.verify_stores()
    assert [one.lost for one in found.values()] == [0, 0, 0, 0]


def test_damage_that_no_replica_repairs_is_lost(admin, stores, monkeypatch):
    monkeypatch.setattr(verify, "REPAIR_WAIT_S", 0.01)
    stores["storage-broker-a-1"].repaired_after = None
    found = admin.verify_stores()
    assert {name: one.lost for name, one in found.items() if one.lost} == {"storage-broker-a-1": 1}


def test_a_restarted_store_begins_again(admin, stores):
    stores["storage-broker-b-0"].restart_at = 2
    found = admin.verify_stores()
    assert found["storage-broker-b-0"].scrub.completed == 1
    assert stores["storage-broker-b-0"].calls.count("verify") == 2


def test_a_store_that_is_away_does_not_hold_up_the_others(admin, stores):
    stores["storage-broker-a-0"].is_away = True
    found = admin.verify_stores()
    assert "it is away" in found["storage-broker-a-0"].error
    assert [one.scrub.completed for one in found.values()] == [0, 1, 1, 1]


def test_the_wait_ends_after_its_time(admin):
    found = admin.verify_stores(timeout_s=0)
    assert all(one.scrub.running for one in found.values())
