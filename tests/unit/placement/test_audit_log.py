"""Tests that the audit log is written to the first store that accepts the record."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from placement.console.audit_log import AUDIT_TOPIC, AuditLog
from raymq.common.errors import ServiceNotAvailableError
from raymq.records.format.check import record_starts
from raymq.tools.console.cluster import AuditEntry


class Store:
    """Fake store that keeps the encoded records of one queue."""

    def __init__(self, *, dead: bool = False) -> None:
        self.dead, self.records = dead, list[bytes]()

    def append(self, batches: list[Any], timeout_s: float) -> None:
        if self.dead:
            raise ServiceNotAvailableError("the actor is dead")
        [batch] = batches
        assert (batch.topic, batch.queue_id) == (AUDIT_TOPIC, 0)
        whole = bytes(batch.records)
        starts = [*record_starts(whole).tolist(), len(whole)]
        self.records += [whole[start:end] for start, end in pairwise(starts)]


def log_of(**stores: Store) -> AuditLog:
    brokers = {name: SimpleNamespace(storages={0: name}) for name in stores}
    client: Any = SimpleNamespace(
        admin=SimpleNamespace(brokers=lambda: brokers), storages=SimpleNamespace(get=lambda name: stores[name])
    )
    return AuditLog(client)


def entry(number: int) -> AuditEntry:
    return AuditEntry(number, "admin", "admin", "10.0.0.1", "topic create", {"topic": f"t{number}"}, "done")


def test_an_entry_goes_to_the_first_store_that_takes_it() -> None:
    stores = {"a": Store(dead=True), "b": Store(), "c": Store()}
    log_of(**stores).write(entry(1))
    assert [len(one.records) for one in stores.values()] == [0, 1, 0]


def test_a_change_that_no_store_accepts_gets_an_error() -> None:
    with pytest.raises(ServiceNotAvailableError, match="the actor is dead"):
        log_of(a=Store(dead=True)).write(entry(1))
