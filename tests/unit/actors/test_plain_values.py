"""Tests that a server's replies to a user's program contain only types of package `raymq`, because the program may lack
the servers' packages."""

from __future__ import annotations

import errno
import inspect
import os
import pickle
import pickletools
import typing
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from typing import Any

import pytest

from actors.broker.actor import Broker
from actors.core.replica.rules import ReplicaRules
from actors.nameserver import NameServer
from actors.pull.actor import Pull
from actors.rebalance import Rebalance
from actors.replica.replicator_actor import Replicator
from actors.replica.storage_actor import Storage
from placement.console.actor import ConsoleService
from placement.controller import Controller
from placement.gateway.actor import Gateway
from storage.running_flags import RunningFlag
from tests.support.replicas.local_replicas import LocalReplicas
from tests.support.stores.stores import make_batch, open_store

SERVER_PACKAGES = ("actors", "placement", "storage", "raydp_jobs")
AMONG_SERVERS = {
    "Storage": {"obey", "following", "history", "align"},
    "Controller": {"leader", "settings", "homes"},
}
"""Methods that only other servers call, by server class."""


def classes_in(hint: Any, seen: set[Any]) -> Iterator[type]:
    """Yield the classes in a type hint, and recursively the classes in the fields of these classes."""
    if hint in seen:
        return
    seen.add(hint)
    for part in typing.get_args(hint):
        if not isinstance(part, (list, str)):
            yield from classes_in(part, seen)
    if isinstance(hint, type):
        yield hint
        if is_dataclass(hint) or hasattr(hint, "_fields"):
            for part in typing.get_type_hints(hint).values():
                yield from classes_in(part, seen)


@pytest.mark.parametrize(
    "server", [Broker, NameServer, Pull, Rebalance, Replicator, Storage, Controller, ConsoleService, Gateway]
)
def test_the_answers_of_public_methods_are_of_raymq(server: type) -> None:
    foreign = []
    for name, method in inspect.getmembers(server, inspect.isfunction):
        if not name.startswith("_") and name not in AMONG_SERVERS.get(server.__name__, ()):
            answer = typing.get_type_hints(inspect.unwrap(method)).get("return")
            foreign += [
                f"{name}: {found.__module__}.{found.__qualname__}"
                for found in classes_in(answer, set())
                if found.__module__.split(".")[0] in SERVER_PACKAGES
            ]
    assert foreign == []


def packages_in(answer: object) -> set[str]:
    """Return the packages that a program must import to unpickle a server's reply."""
    found: set[str] = set()
    texts: list[str] = []
    for opcode, argument, _ in pickletools.genops(pickle.dumps(answer, protocol=4)):
        if opcode.name == "STACK_GLOBAL":
            found.add(texts[-2].split(".")[0])
        elif isinstance(argument, str):
            texts.append(argument)
    return found


def test_the_status_of_a_store_is_plain_whatever_has_happened_to_it(tmp_path) -> None:
    store = open_store(tmp_path)
    try:
        store.append([make_batch([b"x"])])
        answers: list[object] = [asdict(store.status()), store.status(), store.statistics()]
        for flag in RunningFlag:
            store.flags.set_flag(flag, "a reason")
        answers += [asdict(store.status()), store.status()]
        store.gate.fail(OSError(errno.EIO, os.strerror(errno.EIO)))
        answers += [asdict(store.status()), store.status(), store.statistics()]
        for answer in answers:
            assert packages_in(answer).isdisjoint(SERVER_PACKAGES)
        assert type(store.status().running_flags) is int
    finally:
        store.close()
    assert packages_in(asdict(store.status())).isdisjoint(SERVER_PACKAGES)


def test_the_status_of_a_replica_is_plain(tmp_path) -> None:
    group = LocalReplicas(tmp_path, rules=ReplicaRules(lease_s=60.0, slave_timeout_s=60.0))
    try:
        for _ in range(2):
            for replica in group.replicas.values():
                assert packages_in(replica.status()).isdisjoint(SERVER_PACKAGES)
                assert not any(isinstance(value, Enum) for value in replica.status().values())
            group.settle()
    finally:
        group.end()


def test_a_class_of_a_server_would_be_found() -> None:
    assert packages_in({"flags": RunningFlag.DISK_FULL}) >= {"storage"}
    assert {found.__name__ for found in classes_in(dict[str, ReplicaRules], set())} >= {"ReplicaRules"}
    assert [field.name for field in fields(ReplicaRules)]
