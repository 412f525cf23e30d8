"""Tests of `raymq broker` and `raymq store verify`: the calls that the commands make to a fake Admin."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raymq.common.protocol.status import ReplicaGroupReport, ReplicaReport
from raymq.common.protocol.store import Hole, ScrubStatus, StoreVerification


class Brokers:
    """Fake Admin that records which broker groups are writable."""

    def __init__(self) -> None:
        self.writable: dict[str, bool] = {}
        self.found: dict[str, StoreVerification] = {}
        self.asked: list[tuple[str, Any]] = []
        self.orders: list[tuple[Any, ...]] = []
        self.change = ""

    def verification(self, broker: str | None = None) -> dict[str, StoreVerification]:
        self.asked.append(("verification", broker))
        return self.found

    def verify_stores(
        self, broker: str | None = None, *, timeout_s: float, on_progress: Any
    ) -> dict[str, StoreVerification]:
        self.asked.append(("verify_stores", broker, timeout_s))
        on_progress(50, 100)
        on_progress(100, 100)
        return self.found

    def set_broker_writable(self, broker: str, writable: bool) -> None:
        self.writable[broker] = writable

    def change_replicas(self, broker: str, count: int | None, *, replace: int | None) -> None:
        self.orders.append((broker, count, replace))

    def change_min_in_sync_replicas(self, broker: str, least: int) -> None:
        self.orders.append((broker, "min in sync", least))

    def cancel_replica_change(self, broker: str) -> None:
        self.orders.append((broker, "cancel"))

    def replicas(self, broker: str) -> ReplicaGroupReport:
        both = tuple(ReplicaReport(replica, "SLAVE" if replica else "MASTER") for replica in (0, 3))
        return ReplicaGroupReport(broker, 0, 7, (0,), change=self.change, replicas=both)

    def wait_for_replicas(self, broker: str, progress: Any) -> ReplicaGroupReport:
        progress("replica 3 copies the log")
        return self.replicas(broker)


@pytest.fixture
def admin() -> Brokers:
    return Brokers()


def test_a_broker_group_is_made_writable_or_not(run: Any, admin: Brokers) -> None:
    assert "takes no messages" in run("broker", "writable", "off", "broker-b").output
    assert admin.writable == {"broker-b": False}


DONE = ScrubStatus(completed=1, checked_bytes=4096, total_bytes=4096, found=2, repaired=2, age_ms=7_200_000)
HALF = ScrubStatus(running=True, section="log", checked_bytes=1024, total_bytes=2048)


def test_the_progress_of_each_replica_is_shown(run: Any, admin: Brokers) -> None:
    admin.found = {
        "storage-broker-a-0": StoreVerification(DONE, (), "broker-a"),
        "storage-broker-a-1": StoreVerification(HALF, (), "broker-a"),
    }
    shown = json.loads(run("store", "verify", "--json").output)
    rows = [[row[name] for name in ("store", "verified", "found", "repaired", "lost")] for row in shown["stores"]]
    assert rows == [
        ["storage-broker-a-0", "2.0 h ago", 2, 2, 0],
        ["storage-broker-a-1", "50 % (before: not yet)", 0, 0, 0],
    ]
    assert shown["damage"] == []
    assert shown["details"]["storage-broker-a-0"]["scrub"]["completed"] == 1
    assert admin.asked == [("verification", None)]


def test_a_verification_by_command_that_repairs_everything_succeeds(run: Any, admin: Brokers) -> None:
    admin.found = {"storage-broker-a-0": StoreVerification(DONE, (), "broker-a")}
    result = run("store", "verify", "--now", "--broker", "broker-a", "--timeout", "60")
    assert result.exit_code == 0
    assert admin.asked == [("verify_stores", "broker-a", 60)]


@pytest.mark.parametrize(
    ("store", "text"),
    [
        (
            StoreVerification(DONE, (Hole(1000, 443, "the body does not match"),)),
            "443 bytes at 1000 of the log: the body",
        ),
        (StoreVerification(ScrubStatus(completed=1, unrepaired=("file x is damaged",))), "file x is damaged"),
        (StoreVerification(error="actor 'storage-broker-a-0' does not run"), "does not run"),
    ],
)
@pytest.mark.parametrize("now", [True, False])
def test_damage_that_is_not_repaired_fails_the_command(
    run: Any, admin: Brokers, store: StoreVerification, text: str, now: bool
) -> None:
    admin.found = {"storage-broker-a-0": store}
    result = run("store", "verify", *(["--now"] if now else []), "--json", code=1)
    assert text in result.output


def test_a_verification_that_is_not_complete_in_time_fails_the_command(run: Any, admin: Brokers) -> None:
    admin.found = {"storage-broker-a-0": StoreVerification(HALF, (), "broker-a")}
    assert "50 %" in run("store", "verify", "--now", "--timeout", "1", code=1).output
    assert run("store", "verify").exit_code == 0


def test_replicas_are_shown_changed_replaced_and_left_as_they_were(run: Any, admin: Brokers) -> None:
    assert "broker-a has the replicas 0, 3" in run("broker", "replicas", "broker-a").output
    assert admin.orders == []
    for arguments in (["3"], ["--replace", "1"], ["3", "--replace", "1"], ["--min-in-sync", "2"], ["--cancel"]):
        run("broker", "replicas", "broker-a", *arguments)
    assert admin.orders == [
        ("broker-a", 3, None),
        ("broker-a", None, 1),
        ("broker-a", 3, 1),
        ("broker-a", "min in sync", 2),
        ("broker-a", "cancel"),
    ]


def test_a_change_that_has_not_ended_is_shown_and_fails_unless_nobody_waits(run: Any, admin: Brokers) -> None:
    admin.change = "replica 3 joins: replica 3 does not answer yet"
    waited = run("broker", "replicas", "broker-a", "2", "--json", code=1)
    assert json.loads(waited.output)["change"] == admin.change
    assert json.loads(waited.output)["replicas"][1] == {
        "replica": 3,
        "role": "SLAVE",
        "in_sync": False,
        "lag_bytes": None,
        "state": "",
    }
    for arguments in ([], ["2", "--no-wait"]):
        assert admin.change in run("broker", "replicas", "broker-a", *arguments).output


def test_a_cancelled_change_takes_no_other_order(run: Any, admin: Brokers) -> None:
    run("broker", "replicas", "broker-a", "3", "--cancel", code=2)
    run("broker", "replicas", "broker-a", "10", code=2)
    for arguments in (["3"], ["--cancel"], ["--replace", "1"]):
        run("broker", "replicas", "broker-a", "--min-in-sync", "2", *arguments, code=2)
    assert admin.orders == []
