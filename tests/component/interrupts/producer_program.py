"""Interrupts each call of a producer at each point, with a real store and real lanes (direct socket connections).

After each interrupt the same producer sends, and every acknowledged message is stored once. The program prints the
number of interrupted points by call.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from raymq.client.producer.producer import Producer
from raymq.client.producer.settings import ProducerSettings
from raymq.common.message import Message, MessageQueue
from raymq.remoting.storage_client import StorageClient
from tests.component.interrupts.interrupter import Interrupter
from tests.support.clients.fakes import FakeActor, FakeRoutes, description, topic_route
from tests.support.clients.lanes import StorageDouble
from tests.support.stores.stores import open_store

HANG_S = 60
"""Maximum seconds of one step of the program. If a step takes longer, the program prints the stacks of all threads and
exits."""
UNINTERRUPTED = 3
"""The program interrupts a call at one point after another, until the call ends before the point is reached. After this
number of consecutive attempts without an interrupt, it assumes that the call has no more points."""


class Program:
    def __init__(self, root: Path, stride: int) -> None:
        self.stride = stride
        self.double = StorageDouble(open_store(root), host="127.0.0.1")
        where = description(self.double.lanes.address, root=str(root))
        self.client = StorageClient("storage-a-0", "elsewhere")
        self.client._actor = FakeActor({"describe": lambda: where})
        self.client._lanes._actor = self.client._actor
        self.interrupter = Interrupter()
        self.points: dict[str, int] = {}
        self.acknowledged: list[tuple[bytes, int]] = []
        self.number = 0

    def producer(self) -> Producer:
        return Producer(
            "g",
            routes=FakeRoutes(topic_route(a=1)),
            storage=lambda name: self.client,
            born_host=("127.0.0.1", 0),
            settings=ProducerSettings(send_timeout_s=3.0),
        )

    def message(self) -> Message:
        self.number += 1
        return Message("orders", b"%d" % self.number)

    def send(self, producer: Producer) -> None:
        message = self.message()
        self.acknowledged.append((message.body, producer.send(message).queue_offset))

    def try_all(self, name: str, producer: Producer, call: Any) -> None:
        """Interrupt `call` at every `stride`-th of the points at which a signal handler can run. Check after each
        interrupt that the producer can still send."""
        point, ended, count = 1, 0, 0
        while ended < UNINTERRUPTED:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            interrupted = self.interrupter.call(call, point)
            ended = 0 if interrupted else ended + 1
            count += interrupted
            point += self.stride
            try:
                self.send(producer)
                self.send(producer)
            except BaseException as error:
                raise AssertionError(f"{name}: no send after an interrupt at {self.interrupter.where}") from error
        self.points[name] = count

    def run(self) -> None:
        producer, queue = self.producer(), MessageQueue("orders", "a", 0)
        self.send(producer)
        table = pa.table({"body": [b"row 1", b"row 2"]})
        calls = {
            "send": lambda: producer.send(self.message()),
            "send to a queue": lambda: producer.send(self.message(), queue=queue),
            "send by key": lambda: producer.send(self.message(), sharding_key="k"),
            "send_async": lambda: [producer.send_async(self.message()) for _ in range(3)][-1].result(20.0),
            "send_oneway": lambda: producer.send_oneway(self.message()),
            "send_batch": lambda: producer.send_batch([self.message(), self.message()]),
            "send_table": lambda: producer.send_table("orders", table),
            "callback": lambda: producer.send_async(self.message()).add_done_callback(lambda done: None),
            "flush": lambda: (producer.send_oneway(self.message()), producer.flush()),
        }
        for name, call in calls.items():
            self.try_all(name, producer, call)
        self.check_quiet(producer)
        point, ended = 1, False
        while not ended:
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            other = self.producer()
            other.send(self.message())
            ended = not self.interrupter.call(other.close, point)
            other.close()
            point += self.stride
        self.points["close"] = point // self.stride
        producer.close()
        self.check_stored()
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(self.points))

    def check_quiet(self, producer: Producer) -> None:
        """Check that no interrupt has left a resource in use: the producer's buffer is empty, no queue has a send in
        flight, and all lanes (direct socket connections) are free."""
        producer.flush()
        buffer = producer.pipeline.buffer
        assert (buffer._bytes, buffer._count) == (0, 0), f"{buffer._bytes} bytes of {buffer._count} stay taken"
        assert not any(buffer._holders.values()), "holders stay"
        assert all(sender.state.empty for sender in producer.pipeline._senders.values()), "a queue stays under way"
        assert not self.client._lanes._in_use, "a lane stays taken"

    def check_stored(self) -> None:
        """Check that each acknowledged message is stored at its offset, and that no message is stored twice."""
        bodies = [message.body for message in self.double_messages()]
        own = [body for body in bodies if not body.startswith(b"row")]
        assert len(own) == len(set(own)), "a message is stored twice"
        wrong = [body for body, offset in self.acknowledged if bodies[offset] != body]
        assert not wrong, f"{len(wrong)} of {len(self.acknowledged)} acknowledged messages are not at their offsets"

    def double_messages(self) -> list[Any]:
        from raymq.common.protocol.store import FetchRequest
        from raymq.records.format.decode import decode_records

        messages: list[Any] = []
        while True:
            [found] = self.double.store.fetch(
                [FetchRequest("orders", 0, len(messages), 1000)], max_bytes=1 << 24, wait_s=0.0
            )
            more = list(decode_records(found.records, broker_name="a"))
            if not more:
                return messages
            messages += more


if __name__ == "__main__":
    Program(Path(sys.argv[1]), int(sys.argv[2])).run()
