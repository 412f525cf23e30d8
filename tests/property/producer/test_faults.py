"""Tests of a producer with brokers that fail at random: no message is lost or stored twice, and messages keep their
order if order is required.

Each seed draws the result of every append attempt. The broker stores and answers, stores but its answer is lost,
refuses, is unreachable, or is slow. Some runs change the master of a broker group in the middle. The laws:

- every send completes, and an acknowledged message is stored where its result says, once in all brokers together;
- an error other than "unknown" means that the message is stored nowhere; after "unknown" it is stored at most once;
- messages of one key are in one queue in the order sent, and a batch is in one queue in order;
- a queue's sequence numbers only grow (the fake store checks it), and without refusals they have no gaps.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from concurrent.futures import Future

import pytest

from raymq.common.errors import (
    MessageIllegalError,
    NotMasterError,
    RaymqError,
    RequestTimeoutError,
    SendUnknownError,
    ServiceNotAvailableError,
    StoreFailedError,
    StoreNotWritableError,
    SystemBusyError,
)
from raymq.common.message import Message, MessageQueue, SendResult
from raymq.common.protocol.route import BrokerData, QueueData, TopicRoute
from raymq.records.format.decode import decode_records
from tests.support.clients.fakes import WAIT_S, FakeStore
from tests.support.clients.producers import handed_over, producers_of_fakes

SEEDS = 1000 if os.environ.get("RAYMQ_SOAK") else 150
BROKERS = ("a", "b", "c")

GONE = ServiceNotAvailableError("the actor is restarting")
LATE = RequestTimeoutError("append", 1.0)
NO_ANSWER = [GONE, LATE, ("lost", GONE), ("lost", LATE)]
REFUSED = [
    SystemBusyError("busy"),
    NotMasterError("a", 1),
    StoreNotWritableError("full"),
    MessageIllegalError("cursed"),
]
FAILED = ("lost", StoreFailedError("the disk failed"))


def route_of(masters: dict[str, str]) -> TopicRoute:
    brokers = {name: BrokerData("raymq", name, {0: storage}) for name, storage in masters.items()}
    return TopicRoute("orders", brokers, tuple(QueueData(name, 2, 2, 6) for name in masters))


class SeededRun:
    """The brokers, sends and results of one random run, which a seed determines."""

    def __init__(self, seed: int, make) -> None:
        self.chance = random.Random(seed)
        self.masters = {name: f"storage-{name}-0" for name in BROKERS[: self.chance.randint(1, 3)]}
        self.stores = {name: FakeStore(storage) for name, storage in self.masters.items()}
        self.replicas = {name: store.replica(f"storage-{name}-1") for name, store in self.stores.items()}
        self.refusing = self.chance.random() < 0.6
        for store in (*self.stores.values(), *self.replicas.values()):
            store.script = [self.step() for _ in range(self.chance.randint(0, 25))]
            store.connects = [self.chance.choice([None, None, None, GONE, LATE]) for _ in range(10)]
        self.producer = make(
            *self.stores.values(),
            *self.replicas.values(),
            route=route_of(self.masters),
            max_buffered_messages=self.chance.choice([3, 20, 1000]),
            send_latency_enable=self.chance.random() < 0.5,
            retry_when_not_store_ok=self.chance.random() < 0.5,
        )
        self.sent: list[tuple[bytes, str | None, Future[SendResult]]] = []
        self.batches: list[list[Future[SendResult]]] = []

    def step(self):
        """Return the random outcome of one append attempt: None for success, or a failure."""
        if self.chance.random() < 0.4:
            return None
        if self.refusing and self.chance.random() < 0.5:
            return self.chance.choice([*REFUSED, FAILED])
        return self.chance.choice(NO_ANSWER)

    def fail_over(self) -> None:
        name = self.chance.choice(list(self.masters))
        self.masters[name] = f"storage-{name}-1"
        self.refusing = True  # from now on, the old master refuses every append
        self.producer.test_routes.routes["orders"] = route_of(self.masters)
        self.stores[name].script = [NotMasterError(name, 1)] * 100_000

    def send_all(self) -> None:
        for number in range(60):
            if number == 30 and self.chance.random() < 0.5:
                self.fail_over()
            key = self.chance.choice([None, None, "x", "y"])
            count = self.chance.choice([1] * 6 + [3, 6])
            self.send([b"%d.%d" % (number, part) for part in range(count)], key)

    def send(self, bodies: list[bytes], key: str | None) -> None:
        timeout_s = 0.001 if self.chance.random() < 0.05 else WAIT_S
        try:
            futures = handed_over(
                self.producer, [Message("orders", body) for body in bodies], {"sharding_key": key}, timeout_s
            )
        except SystemBusyError as error:  # the producer's buffer stayed full for the whole short send timeout
            futures = [Future() for _ in bodies]
            for future in futures:
                future.set_exception(error)
        self.batches.append(futures)
        self.sent += [(body, key, future) for body, future in zip(bodies, futures, strict=True)]

    def stored(self) -> dict[MessageQueue, list[bytes]]:
        return {
            MessageQueue(topic, name, queue_id): bodies
            for name, store in self.stores.items()
            for (topic, queue_id), bodies in store.queues.items()
        }


@pytest.fixture(scope="module")
def make():
    with producers_of_fakes() as make:
        yield make


@pytest.mark.parametrize("start", range(0, SEEDS, 50))
def test_nothing_is_lost_or_doubled_and_order_holds(make, start):
    for seed in range(start, start + 50):
        print("seed", seed)
        run = SeededRun(seed, make)
        run.send_all()
        run.producer.flush(WAIT_S * 3)
        check(run)
        run.producer.close()


def check(run: SeededRun) -> None:
    stored = run.stored()
    times = Counter(body for bodies in stored.values() for body in bodies)
    acknowledged: dict[bytes, SendResult] = {}
    for body, _, future in run.sent:
        error = future.exception(0)
        if error is None:
            acknowledged[body] = future.result()
            assert stored[future.result().queue][future.result().queue_offset] == body
            assert times[body] == 1
        elif isinstance(error, SendUnknownError):
            assert times[body] <= 1
        else:
            assert isinstance(error, RaymqError)
            assert times[body] == 0, error
    assert set(times) <= {body for body, _, _ in run.sent}
    for key in ("x", "y"):
        bodies = [body for body, of, _ in run.sent if of == key and body in acknowledged]
        assert len({acknowledged[body].queue for body in bodies}) <= 1
        offsets = [acknowledged[body].queue_offset for body in bodies]
        assert offsets == sorted(offsets)
    for futures in run.batches:
        results = [future.result() for future in futures if future.exception(0) is None]
        assert len({result.queue for result in results}) <= 1
        assert [result.queue_offset for result in results] == sorted(result.queue_offset for result in results)
    check_sequences(run)


def check_sequences(run: SeededRun) -> None:
    """Check that each sequence number of a queue belongs to one message. If no broker refused an append, the numbers
    have no gaps."""
    owners: dict[tuple[str, int, int], str] = {}
    for name, store in run.stores.items():
        for batches in (*store.attempts, *run.replicas[name].attempts):
            for batch in batches:
                for place, record in enumerate(decode_records(batch.records, broker_name=name)):
                    key = (name, batch.queue_id, batch.producer.first_sequence + place)
                    assert owners.setdefault(key, record.message_id) == record.message_id
    if not run.refusing:
        for name, queue_id in {(name, queue_id) for name, queue_id, _ in owners}:
            sequences = sorted(number for broker, queue, number in owners if (broker, queue) == (name, queue_id))
            assert sequences == list(range(len(sequences)))
