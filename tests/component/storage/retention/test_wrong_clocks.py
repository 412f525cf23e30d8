"""Tests of retention in a store whose clock is wrong: no message is deleted before it has been stored for its time."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path

import pytest

from storage.message_store import MessageStore
from storage.queue.topic_attributes import TOPICS_FILE
from storage.retention import cleaner
from tests.support.stores.clocks import let_pass
from tests.support.stores.stores import bodies_of, make_batch, open_store

MINUTE_S = 60
STEPS_S = [-24 * 60 * MINUTE_S, -10 * MINUTE_S, 10 * MINUTE_S, 24 * 60 * MINUTE_S]
TOPICS = json.dumps(
    {"topicConfigTable": {"bills": {"topicName": "bills", "attributes": {"reserve.time": str(5 * MINUTE_S * 1000)}}}}
)


class Machine:
    """A machine whose wall clock is wrong by `wrong_s` seconds, with a store.

    The machine keeps log files for an hour, and messages of the topic `bills` for five minutes.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.wrong_s = root, 0
        self.store: MessageStore

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self.wrong_s * 1000

    def open(self) -> None:
        self.store = open_store(self.root, clock_ms=self.now_ms, file_reserved_time_hours=1, delete_when="4")
        self.store.write_config(TOPICS_FILE, TOPICS)

    def fill(self, first: int) -> None:
        for n in range(first, first + 200):
            self.store.append([make_batch([b"%03d" % n + b"x" * 300]), make_batch([b"%03d" % n], topic="bills")])

    def clean(self) -> int:
        """Run retention by the wall clock. Log files have the times that a machine with this clock writes."""
        self.store.cleaner._by_hand = 1
        return self.store.cleaner.run_once(datetime.fromtimestamp(self.now_ms() / 1000))

    def count(self, topic: str) -> int:
        return len(bodies_of(self.store, topic))


@pytest.fixture
def machine(tmp_path: Path, no_flushes: None, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(cleaner, "DELETE_PAUSE_S", 0.0)
    monkeypatch.setattr(cleaner, "disk_usage", lambda path: 0.5)
    return Machine(tmp_path / "store")


@pytest.mark.parametrize("step_s", STEPS_S)
@pytest.mark.parametrize("restarts", [False, True])
def test_a_step_of_the_clock_deletes_nothing(machine: Machine, step_s: int, restarts: bool) -> None:
    machine.open()
    machine.fill(0)
    assert machine.clean() == 0
    machine.wrong_s = step_s
    if restarts:
        machine.store.close()
        machine.open()
    assert machine.clean() == 0
    machine.fill(200)
    assert machine.clean() == 0
    machine.wrong_s = 0
    assert machine.clean() == 0
    assert machine.count("orders") == machine.count("bills") == 400
    machine.store.close()


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_clock_that_was_wrong_from_the_start_deletes_nothing_when_it_is_set_right(
    machine: Machine, step_s: int
) -> None:
    machine.wrong_s = step_s
    machine.open()
    machine.fill(0)
    for path in (machine.root / "commitlog").iterdir():
        os.utime(path, (machine.now_ms() / 1000,) * 2)
    assert machine.clean() == 0
    machine.wrong_s = 0
    assert machine.clean() == 0
    assert machine.count("orders") == machine.count("bills") == 200
    machine.store.close()


def test_with_a_right_clock_messages_are_deleted_after_their_time(machine: Machine) -> None:
    machine.open()
    machine.fill(0)
    let_pass(machine.store, 0.1)
    machine.wrong_s = 6 * MINUTE_S
    assert machine.clean() == 0
    assert (machine.count("orders"), machine.count("bills")) == (200, 0)
    let_pass(machine.store, 1)
    machine.wrong_s += 60 * MINUTE_S
    assert machine.clean() > 0
    assert 0 < machine.count("orders") < 200
    machine.store.close()
