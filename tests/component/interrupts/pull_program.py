"""Interrupts each call of a pull consumer at each point. The consumer reads from a real store, either directly from the
store's files or by fetches.

After each interrupt the same consumer polls. At the end, every message must have been polled at least once before its
offset was committed. The program prints the number of interrupted points by call.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from raymq.client.consumer.assignment.offset_committer import CommitThreads
from raymq.client.consumer.pull import engine as pull_engine
from raymq.client.consumer.pull.consumer import PullConsumer
from raymq.client.consumer.pull.engine import PullEngine
from raymq.client.consumer.pull.settings import PullSettings
from tests.component.interrupts.interrupter import Interrupter
from tests.support.clients.fakes import FakeRoutes, topic_route
from tests.support.clients.members import QuickClient
from tests.support.clients.watches import MappedStorage
from tests.support.group_sim.pull_group import Q0, Q1, Group
from tests.support.stores.stores import make_batch, open_store

HANG_S = 60
UNINTERRUPTED = 3
POLL_S = 20.0


class Rows:
    """The rows of a polled table, as objects with an attribute `body`."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __iter__(self) -> Iterator[SimpleNamespace]:
        return (SimpleNamespace(body=body) for body in self._table.column("body").to_pylist())


class Program:
    def __init__(self, root: Path, stride: int, *, here: bool) -> None:
        self.stride = stride
        self.store = open_store(root)
        self.storage: Any = MappedStorage(self.store)
        if not here:
            self.storage.reader = lambda: None
        self.group = Group()
        pull_engine.GroupOffsets = lambda name: self.group  # type: ignore[assignment, misc]
        self.commits = CommitThreads()
        self.interrupter = Interrupter()
        self.points: dict[str, int] = {}
        self.stored = 0
        self.polled: set[bytes] = set()
        self.got: list[Any] = []
        """The messages or the table that the interrupted call returned. The program adds them to `polled` after the
        call, when no signal handler can interrupt it."""

    def consumer(self, **options: Any) -> PullConsumer:
        engine = PullEngine(
            PullSettings.of("billing", **options),
            routes=FakeRoutes(topic_route(a=2)),  # type: ignore[arg-type]
            storages=SimpleNamespace(get=lambda name: self.storage),  # type: ignore[arg-type]
            rebalance=QuickClient(self.group.heartbeat),  # type: ignore[arg-type]
            commits=self.commits,
            node_id="node-1",
            announce=lambda engine, data: None,
            on_close=lambda engine: None,
        )
        return PullConsumer(engine)

    def append(self) -> bytes:
        """Store one message."""
        body = b"%d" % self.stored
        self.stored += 1
        self.store.append([make_batch([body])])
        return body

    def note(self, messages: Any) -> None:
        self.polled.update(message.body for message in messages)

    def poll_for(self, consumer: PullConsumer, body: bytes) -> None:
        """Poll until the message with this body arrives."""
        while body not in self.polled:
            messages = consumer.poll(500, POLL_S)
            assert messages, f"{body!r} did not come in {POLL_S:g} s"
            self.note(messages)

    def try_all(self, name: str, consumer: PullConsumer, call: Any, recover: Callable[[], None] = lambda: None) -> None:
        """Interrupt a call at each `stride`-th point at which a signal handler can run. After each interruption, call
        `recover` and check that the consumer skips no message."""
        point, ended, count = 1, 0, 0
        while ended < UNINTERRUPTED:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            self.append()
            self.got = []
            interrupted = self.interrupter.call(call, point)
            self.note([message for messages in self.got for message in messages])
            ended = 0 if interrupted else ended + 1
            count += interrupted
            point += self.stride
            try:
                if interrupted:
                    recover()
                self.poll_for(consumer, self.append())
                assert len(self.polled) == self.stored, "a message was skipped"
            except BaseException as error:
                raise AssertionError(f"{name}: no poll after an interrupt at {self.interrupter.where}") from error
        self.points[name] = count

    def run(self) -> None:
        consumer = self.consumer()
        consumer.subscribe("orders")
        self.poll_for(consumer, self.append())
        calls = {
            "poll": lambda: self.got.append(consumer.poll(500, POLL_S)),
            "poll_table": lambda: self.got.append(Rows(consumer.poll_table(500, POLL_S))),
            "iteration": lambda: self.got.append([next(iter(consumer))]),
            "commit": consumer.commit,
            "committed": lambda: consumer.committed(Q0),
            "position": lambda: consumer.position(Q0),
            "assignment": consumer.assignment,
            "pause": lambda: consumer.pause([Q1]),
            "resume": lambda: consumer.resume([Q0]),
            "paused": consumer.paused,
            "seek": lambda: consumer.seek(Q0, self.stored - 1),
            "lag": consumer.lag,
            "end_offsets": lambda: consumer.end_offsets([Q0, Q1]),
            "subscribe": lambda: consumer.subscribe("orders"),
        }
        for name, call in calls.items():
            self.try_all(name, consumer, call)
            if name == "pause":
                consumer.resume([Q0])
        self.calling_from_c(consumer)
        consumer.close()
        self.acknowledging()
        self.closing()
        self.commits.close()
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(self.points))

    def calling_from_c(self, consumer: PullConsumer) -> None:
        """Interrupt a poll so that its result is lost. Python's C code calls the poll, because the call unpacks a tuple
        of arguments (`poll(*arguments)`). The signal handler therefore runs after the poll has returned, and its
        exception discards the result.

        After a seek to the committed offset, the consumer polls the lost messages again.
        """
        arguments = (500, POLL_S)
        lost = 0

        def recover() -> None:
            nonlocal lost
            if self.interrupter.where.startswith("the return of") and self.interrupter.where.endswith(
                (" poll", "_table")
            ):
                assert len(self.polled) < self.stored, "nothing is lost"
                lost += 1
                consumer.seek(Q0, consumer.committed(Q0) or 0)

        for name, call in {
            "poll from C": lambda: self.got.append(consumer.poll(*arguments)),
            "poll_table from C": lambda: self.got.append(Rows(consumer.poll_table(*arguments))),
        }.items():
            lost = 0
            self.try_all(name, consumer, call, recover)
            assert lost or self.stride > 1, f"{name}: the handler never ran after its return"

    def acknowledging(self) -> None:
        """Interrupt calls of a consumer that acknowledges each message. Check that no unacknowledged message is
        committed."""
        consumer = self.consumer(acknowledge_each=True)
        consumer.assign([Q0])
        self.poll_for(consumer, self.append())

        def poll_and_acknowledge() -> None:
            self.got.append(consumer.poll(500, POLL_S))
            consumer.acknowledge(self.got[-1])

        self.try_all("acknowledge", consumer, poll_and_acknowledge)
        self.try_all("assign", consumer, lambda: consumer.assign([Q0, Q1]))
        consumer.close()

    def closing(self) -> None:
        """Interrupt the close of a consumer. Check that the consumer can still be closed."""
        point, ended = 1, False
        while not ended:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            consumer = self.consumer()
            consumer.assign([Q0])
            ended = not self.interrupter.call(consumer.close, point)
            consumer.close()
            point += self.stride
        self.points["close"] = point // self.stride


if __name__ == "__main__":
    Program(Path(sys.argv[1]), int(sys.argv[2]), here=sys.argv[3] == "here").run()
