"""A broker's state when its group's master changes: what is read from whom, and what is not written to whom."""

from __future__ import annotations

from typing import Any

import pytest

from actors.state_log import StateLog
from raymq.errors import NotMasterError, ServiceNotAvailableError
from raymq.message import PullStatus
from raymq.store_api import FetchResult, QueueBounds


class Store:
    """A storage actor with config files and an empty log; it answers nothing while it is `away`."""

    def __init__(self, name: str) -> None:
        self.name, self.away, self.replaced = name, False, False
        self.asked: list[str] = []
        self.files: dict[str, str] = {}

    def control(self, method: str, *args: Any, timeout_s: float) -> Any:
        if self.away:
            raise ServiceNotAvailableError(f"{self.name} is away")
        self.asked.append(method)
        if self.replaced:
            raise NotMasterError("broker-a", 7)
        if method == "write_config":
            self.files[args[0]] = args[1]
            return None
        return self.files.get(args[0])

    def queue_bounds(self, topic: str, queue_id: int, timeout_s: float) -> QueueBounds:
        return QueueBounds(0, 0, 0)

    def fetch(self, requests: Any, max_bytes: int, wait_s: float, timeout_s: float) -> list[FetchResult]:
        return [FetchResult(PullStatus.NO_NEW_MESSAGE, 0, 0, 0, b"", 0)]


def test_a_master_that_cannot_be_read_is_tried_once_so_that_another_may_be_asked_for():
    first, second = Store("storage-broker-a-0"), Store("storage-broker-a-1")
    log = StateLog("broker-a", first, lambda records: [])  # type: ignore[arg-type]
    log.load()
    assert log.is_ready
    second.away = True
    log.move(second, [first])  # type: ignore[arg-type,list-item]
    with pytest.raises(ServiceNotAvailableError):
        log.load()
    assert not log.is_ready
    assert "storage-broker-a-1 is away" in log.waiting_for
    second.away = False
    log.load()
    assert log.is_ready


def test_no_snapshot_of_the_old_masters_state_is_written_to_the_new_one_before_its_own_was_read():
    first, second = Store("storage-broker-a-0"), Store("storage-broker-a-1")
    log = StateLog("broker-a", first, lambda records: [])  # type: ignore[arg-type]
    log.load()
    log._position = 7  # something was changed that no snapshot has
    log.move(second, [])  # type: ignore[arg-type]
    log.snapshot()
    assert second.files == {}


def test_a_change_does_not_hold_up_the_move_to_another_master_by_asking_the_old_one_again():
    first, second = Store("storage-broker-a-0"), Store("storage-broker-a-1")
    log = StateLog("broker-a", first, lambda records: [])  # type: ignore[arg-type]
    log.load()
    first.replaced = True
    with pytest.raises(NotMasterError):
        log.change(lambda state: state.decide_topic("orders", 1, 1))
    assert first.asked.count("open_topic") == 1
    log.move(second, [first])  # type: ignore[arg-type,list-item]
    log.load()
    assert "orders" not in log.ready().topics
