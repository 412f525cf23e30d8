"""Tests of a Replicator whose lanes (direct socket connections) are refused, cut or restarted. The slave continues to
copy the log, and no appended message is lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.replica import replicator_actor as module
from actors.replica.replicator_actor import Replicator
from raymq.common.errors import RaymqError
from raymq.common.names import StorageName
from raymq.remoting.lane.address import LaneAddress
from raymq.remoting.lane.frames import CHECKED_HEADER
from raymq.remoting.lane.handshake import HELLO_BYTES, VERDICT_BYTES
from tests.support.clients.fakes import WAIT_S, description
from tests.support.clients.lanes import CuttingProxy
from tests.support.history.waiting import eventually
from tests.support.replicas.local_replicas import GROUP, LocalCalls, LocalReplicas
from tests.support.stores.stores import bodies_of, make_batch

pytestmark = pytest.mark.usefixtures("no_flushes")
MASTER, SLAVE = 0, 1


class Actors:
    """Fake references to the storage actors of a broker group. `change`: by replica, a function that alters the address
    that the actor's `describe` returns."""

    def __init__(self, group: LocalReplicas) -> None:
        self.group = group
        self.change: dict[int, Callable[[LaneAddress], LaneAddress]] = {}
        self.described = {MASTER: 0, SLAVE: 0}

    def ref(self, name: str) -> Any:
        replica = StorageName.parse(name).replica
        return SimpleNamespace(
            name=name,
            call=lambda method, *arguments, timeout_s: self._call(replica, method, arguments),
            start=lambda method, *arguments: self._start(replica, method, arguments),
        )

    def _start(self, replica: int, method: str, arguments: tuple[Any, ...]) -> Future[Any]:
        answer: Future[Any] = Future()
        try:
            answer.set_result(self._call(replica, method, arguments))
        except RaymqError as error:
            answer.set_exception(error)
        return answer

    def _call(self, replica: int, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "describe":
            self.described[replica] += 1
            address = self.group.planes[replica].address
            return description(self.change.get(replica, lambda one: one)(address), node_id="elsewhere")
        if method in ("following", "history", "align"):
            return getattr(self.group.replicas[replica], method)(*arguments)
        return LocalCalls(self.group, replica).call(method, *arguments, timeout_s=WAIT_S)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[LocalReplicas]:
    group = LocalReplicas(tmp_path, 2, host="127.0.0.1")
    group.settle()
    yield group
    group.end()


@pytest.fixture
def actors(group: LocalReplicas, monkeypatch: pytest.MonkeyPatch) -> Actors:
    actors = Actors(group)
    monkeypatch.setattr(module, "ActorRef", actors.ref)
    monkeypatch.setattr(module, "resolve", lambda answer, what, timeout_s: answer.result(timeout_s))
    monkeypatch.setattr(
        module,
        "ray",
        SimpleNamespace(
            get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "here"),
            wait=lambda references, timeout, fetch_local: (references, []),
        ),
    )
    return actors


@pytest.fixture
def replicator(actors: Actors) -> Iterator[Replicator]:
    replicator = Replicator(StorageName(GROUP, SLAVE))
    yield replicator
    replicator.close()


class Appends:
    """Appends messages to the master, which acknowledges each append only after the slave has copied the
    record."""

    def __init__(self, group: LocalReplicas) -> None:
        self._group, self.sent = group, list[bytes]()

    def one(self) -> threading.Thread:
        """Append a message in a new thread. The thread ends when the master has acknowledged the append."""
        body = b"%d" % len(self.sent)
        self.sent.append(body)
        thread = threading.Thread(target=self._group.master.append, args=([make_batch([body])],), daemon=True)
        thread.start()
        return thread

    def check(self) -> None:
        """Check that the logs of master and slave have every appended message, once and in order."""
        assert bodies_of(self._group.master.store) == self.sent
        ends = {replica.account().end_offset for replica in self._group.replicas.values()}
        assert len(ends) == 1


@pytest.mark.parametrize("replica", [MASTER, SLAVE])
@pytest.mark.parametrize("field", ["port", "secret", "no port"])
def test_copying_continues_once_a_refused_lane_opens(group, actors, replicator, replica, field):
    appends = Appends(group)
    appends.one().join(WAIT_S)
    former = group.planes[replica].address
    actors.change[replica] = {
        "port": lambda one: former,
        "secret": lambda one: replace(one, secret=b"x" * 32),
        "no port": lambda one: replace(one, port=0),
    }[field]
    group.restart_lanes(replica)
    seen = actors.described[replica]
    thread = appends.one()
    eventually(lambda: actors.described[replica] >= seen + 3, "the Replicator to retry", WAIT_S)
    assert "cannot open a lane" in replicator.status()["error"]
    actors.change.clear()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "the append is acknowledged"
    appends.one().join(WAIT_S)
    appends.check()


def test_copying_continues_after_cut_lanes_and_restarted_servers(group, actors, replicator):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    appends = Appends(group)
    appends.one().join(WAIT_S)
    for _ in range(6):
        replica = dice.choice([MASTER, SLAVE])
        group.restart_lanes(replica)
        proxy = CuttingProxy(
            group.planes[replica].address,
            HELLO_BYTES + VERDICT_BYTES + dice.choice([1, CHECKED_HEADER.size, CHECKED_HEADER.size + 9]),
        )
        actors.change[replica] = lambda one, proxy=proxy: proxy.address
        # Restart the lanes (direct socket connections) of the other replica, which has no proxy. This interrupts the
        # copy that the Replicator makes. The Replicator then opens new lanes, also to the replica with the proxy.
        group.restart_lanes(1 - replica)
        thread = appends.one()
        eventually(lambda proxy=proxy: proxy.cuts, "a lane to be cut", WAIT_S)
        actors.change.clear()
        proxy.close()
        if dice.random() < 0.5:
            group.restart_lanes(replica)
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the append is acknowledged"
    appends.check()
