"""Tests with values that an older raymq wrote, stored or pickled, before raymq's modules moved into packages. The
values are in tests/fixtures/raymq-before-wings."""

from __future__ import annotations

import base64
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import raymq
from raymq.common.config.cluster import ClusterSettings
from raymq.common.config.store import StoreOptions
from raymq.common.protocol.route import TopicRoute
from tests.support.stores.stores import bodies_of, make_batch, open_store

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures/raymq-before-wings"
PICKLES: dict[str, str] = json.loads((FIXTURE / "pickles.json").read_text())
QUEUE = raymq.MessageQueue("orders", "broker-a", 1)
VALUES: dict[str, Any] = {
    "a message": raymq.Message("orders", b"body", tags="paid", keys=["o-17"], properties={"colour": "red"}),
    "a queue": QUEUE,
    "a send result": raymq.SendResult(raymq.SendStatus.SEND_OK, "m" * 32, "o" * 32, QUEUE, 12),
    "a filter": raymq.sql("colour = 'red'"),
    "credentials": raymq.Credentials("me", "a long secret"),
}
NOT_PUBLIC = {"settings of a cluster": ClusterSettings, "options of a store": StoreOptions, "a route": TopicRoute}
"""Pickled values whose classes are not part of the public API, by description: constructor arguments of actors, and
results of actors.

These classes get more fields over time, so the test compares only the class of a value.
"""
NAME_SERVER = "the class of a NameServer"
PICKLED_BY = (3, 11)
"""The Python version whose bytecode the pickled class of a NameServer contains. All nodes of a Ray cluster run the same
Python version, so no cluster starts this class on another version."""
START_AGAIN = """
import base64, pickle, sys
kind = pickle.loads(base64.b64decode(sys.argv[1]))
kind.__new__(kind)
print(kind.__name__, sys.path[0])
"""


def unpickled(name: str) -> Any:
    """Unpickle the public object `name` from the bytes that an older raymq pickled."""
    return pickle.loads(base64.b64decode(PICKLES[name]))


@pytest.mark.parametrize("name", sorted(set(PICKLES) - set(VALUES) - set(NOT_PUBLIC) - {NAME_SERVER}))
def test_a_public_name_that_was_pickled_is_the_public_name(name: str) -> None:
    public, found = getattr(raymq, name), unpickled(name)
    if isinstance(public, type) and issubclass(public, raymq.RaymqError):
        assert type(found) is public
        assert str(found)
        assert found.code == public.code
    else:
        # Compare the unpickled object with the public object by ==, not by `is`: a few public names are types such as
        # Callable[[...], None].
        assert found == public


@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_was_pickled_is_the_same_value(name: str) -> None:
    found = unpickled(name)
    assert type(found) is type(VALUES[name])
    assert found == VALUES[name]


@pytest.mark.parametrize("name", NOT_PUBLIC)
def test_a_value_of_a_server_that_was_pickled_has_the_present_class(name: str) -> None:
    assert type(unpickled(name)) is NOT_PUBLIC[name]


@pytest.mark.skipif(
    sys.version_info[:2] != PICKLED_BY, reason="the class was pickled with its bytecode, which is of Python 3.11"
)
def test_the_class_of_an_actor_that_ray_kept_starts_the_actor_again() -> None:
    """A pickled actor class of an older raymq can start its actor again. When Ray restarts a detached actor, it calls
    `__new__` of the stored class. `__new__` puts the directory of the servers' packages first in sys.path."""
    command = [sys.executable, "-c", START_AGAIN, PICKLES[NAME_SERVER]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    name, _, folder = done.stdout.strip().partition(" ")
    assert (name, done.stderr) == ("NameServer", "")
    assert (Path(folder) / "actors/nameserver.py").is_file()


def test_an_older_store_opens_with_its_messages_and_recognises_repeats(tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(FIXTURE / "store", root)
    store = open_store(root)
    try:
        numbered, repeated = [b"message %d" % n for n in range(40)], [b"again %d" % n for n in range(10)]
        assert bodies_of(store) == numbered
        assert bodies_of(store, queue_id=1) == repeated
        assert bodies_of(store, "bills") == [b"x" * 3000]
        store.append([make_batch(repeated, queue_id=1, producer=("spark/0", 3, 20))])
        assert bodies_of(store, queue_id=1) == repeated
        store.append([make_batch([b"new"])])
        assert bodies_of(store) == [*numbered, b"new"]
    finally:
        store.close()
