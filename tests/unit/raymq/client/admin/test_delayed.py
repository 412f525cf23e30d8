"""Tests of the list of delayed messages: a record of a delay queue is damaged, or a broker group has no master."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from actors.replica.sole_replica import SoleReplica
from raymq.client.admin.admin import Admin
from raymq.client.consumer import repair_wait
from raymq.common.delay import TIMER_TOPIC, timer_queue
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.message import Message
from raymq.common.names import SCHEDULE_TOPIC
from raymq.common.protocol.route import BrokerData
from raymq.common.protocol.store import QueuePosition
from raymq.records.format.encode import WaitingBatch, encode_batch
from raymq.tools import cli
from storage.message_store import MessageStore
from tests.support.clients.fakes import WAIT_S, connect_commands
from tests.support.stores.clocks import Clock
from tests.support.stores.damage import FIELDS, flip
from tests.support.stores.damaged_topic import ReportedStore
from tests.support.stores.stores import open_store

BODIES = [b"level", b"timer"]


class Delays:
    """A store in which one message waits with a delay level, and one with a delivery time. At the second report of
    damage, another replica's bytes repair the store."""

    def __init__(self, root: Path, store: MessageStore, clock: Clock) -> None:
        self.root, self.store = root, store
        self.storages = {0: "storage-broker-a-0"}
        self.reported = ReportedStore(store, root, [])
        due_ms = clock.now_ms + 20_000
        kept = [
            (Message("orders", BODIES[0], delay_level=3), SCHEDULE_TOPIC, 2),
            (Message("orders", BODIES[1], deliver_at_ms=due_ms), TIMER_TOPIC, timer_queue(due_ms, clock.now_ms)),
        ]
        self.positions = [QueuePosition(topic, queue_id, 0) for _, topic, queue_id in kept]
        batches = [
            encode_batch([message], queue_id, born_host=("127.0.0.1", 1), born_timestamp_ms=clock.now_ms,
                         message_ids=["ID"], waiting=WaitingBatch(topic, [3]))
            for message, topic, queue_id in kept
        ]  # fmt: skip
        self.places = [store.append([batch])[0].physical_offset for batch in batches]

    @property
    def admin(self) -> Admin:
        def brokers() -> dict[str, BrokerData]:
            return {"broker-a": BrokerData("c", "broker-a", self.storages)}

        storage = SimpleNamespace(control=self._control, report_damage=self.reported.report_damage)
        routes = SimpleNamespace(brokers=brokers)
        return Admin(routes, SimpleNamespace(get=lambda name: storage))  # type: ignore[arg-type]  # stand-ins

    def flip(self, number: int, field: str) -> None:
        """Flip a bit in a field of a message's record."""
        flip(self.root, self.places[number], field)
        self.reported.flips.append((self.places[number], field))

    def _control(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        assert method == "delayed"
        return self.store.schedule.waiting(*arguments)


@pytest.fixture
def delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Delays]:
    monkeypatch.setattr(repair_wait, "ADMIN_REPAIR_WAIT_S", WAIT_S)
    monkeypatch.setattr(repair_wait, "READ_REPAIR_WAIT_S", WAIT_S)
    clock = Clock()
    store = open_store(tmp_path, clock_ms=clock)
    try:
        yield Delays(tmp_path, store, clock)
    finally:
        store.close()


def listed(delays: Delays) -> list[bytes | None]:
    """Return the bodies of the delayed messages; None for a message that cannot be read."""
    found = [one.message for one in delays.admin.delayed().next_due]
    return [None if message.body_error is not None else message.body for message in found]


@pytest.mark.parametrize("field", [field for field in FIELDS if field != "size"])
@pytest.mark.parametrize("number", range(len(BODIES)), ids=["level", "timer"])
def test_a_damaged_delayed_message_is_listed_after_its_repair(delays: Delays, number: int, field: str) -> None:
    delays.flip(number, field)
    assert listed(delays) == BODIES
    assert delays.reported.positions[0] == [delays.positions[number]]


def test_two_damaged_delayed_messages_are_listed_after_their_repair(delays: Delays) -> None:
    for number in range(len(BODIES)):
        delays.flip(number, "body")
    assert listed(delays) == BODIES


def test_a_delayed_message_that_no_replica_has_is_listed_at_once_as_damaged(delays: Delays) -> None:
    delays.flip(0, "body")
    delays.reported.replica = SoleReplica(delays.store)
    delays.reported.replica.report_damage([delays.positions[0]])
    assert delays.store.reported.settle(60.0)
    assert listed(delays) == [None, BODIES[1]]
    assert delays.reported.positions == [[delays.positions[0]]]


def test_the_command_shows_why_a_delayed_message_cannot_be_read(
    delays: Delays, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays.flip(0, "magic")
    delays.reported.replica = SoleReplica(delays.store)
    delays.reported.replica.report_damage([delays.positions[0]])
    assert delays.store.reported.settle(60.0)
    connect_commands(monkeypatch, SimpleNamespace(admin=delays.admin))
    done = CliRunner().invoke(cli.cli, ["delayed", "--json"])
    assert done.exit_code == 0, done.output
    first, second = json.loads(done.stdout)["next_due"]
    assert (first["topic"], first["level"], first["message_id"]) == ("", 3, "")
    assert f"offset {delays.positions[0].queue_offset}" in first["error"]
    assert (second["topic"], second["level"], second["error"]) == ("orders", 0, None)


def test_intact_delayed_messages_are_not_reported(delays: Delays) -> None:
    assert listed(delays) == BODIES
    assert delays.reported.positions == []


def test_a_broker_group_without_a_master_is_named(delays: Delays) -> None:
    delays.storages = {}
    with pytest.raises(ServiceNotAvailableError, match=r"broker-a.*has no master"):
        delays.admin.delayed()
