"""Test of transactions over changes of the master: requests reach the old and the new masters late, repeated, in any
order, and with offsets that a failover has given to other half messages.

Three replicas with real stores and the real replication run in this process. The test drives their clients, the
Controller and the faults. A master is closed, or is cut off and serves clients that have not found its successor. At
the end, each replica has the message of each committed transaction once, and no other message.

RAYMQ_CHAOS_TRANSACTIONS (default 500, 10,000 by `make soak`) is the number of transactions. RAYMQ_CHAOS_SEED repeats
the choices of a run.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from actors.replica.replica import Replica
from raymq.common.errors import RaymqError, TransactionError
from raymq.common.message import Message, MessageQueue, SendStatus
from raymq.common.protocol.store import AppendResult
from raymq.common.protocol.transactions import EndResult, EndTransactionRequest, LocalTransactionState as State
from raymq.records.format.encode import EncodedBatch, ProducerSequence
from storage.append.durability import StartedAppend
from tests.support.cases import chaos_seed
from tests.support.history.log_rules import RULES, check_log
from tests.support.history.observations import Observation, Observations, Seen
from tests.support.history.waiting import eventually
from tests.support.replicas.local_replicas import LocalReplicas, give_up
from tests.support.stores.stores import read_queue
from tests.support.stores.transactions import GROUP, half_batch

pytestmark = pytest.mark.usefixtures("no_flushes")

SOAK = os.environ.get("RAYMQ_SOAK") == "1"
COUNT = int(os.environ.get("RAYMQ_CHAOS_TRANSACTIONS", "10000" if SOAK else "500"))
OF_A_GROUP = 250
"""Number of transactions of one broker group. More transactions run in several groups, each with its own seed."""
QUEUES = 2
BETWEEN_FAULTS = (5, 40)
"""Smallest and largest number of requests between two faults, and to both masters while one is cut off."""
SETTLED = 0.2
"""Probability that the clients wait for all answers after a request."""
COMMITTED = 0.6
SENT_AGAIN = 0.6
"""Probability that a late request is sent once more later."""


@dataclass(slots=True)
class Payment:
    """A transaction as its producer records it. `commits`: the outcome of the local transaction, None before it ran.

    `places`: the queue offsets and physical offsets that any master has answered for the half message.
    """

    name: str
    batch: EncodedBatch
    commits: bool | None = None
    places: list[tuple[int, int]] = field(default_factory=list)

    def decide(self, commits: bool) -> None:
        """Set the outcome, unless the local transaction already has one."""
        if self.commits is None:
            self.commits = commits

    def order(self, place: tuple[int, int], *, checked: bool = False) -> EndTransactionRequest:
        state = State.COMMIT_MESSAGE if self.commits else State.ROLLBACK_MESSAGE
        return EndTransactionRequest(GROUP, *place, int(state), self.name, checked)


@dataclass(slots=True)
class Call:
    """A request that a master is working on. `end`: the request to end a transaction; None for a half message."""

    payment: Payment
    started: StartedAppend
    begin_s: float
    end: EndTransactionRequest | None = None


class Clients:
    """The producers and the reader of one broker group. They call the master of their choice, which may be an old
    master. `dice`: makes all choices."""

    def __init__(self, group: LocalReplicas, dice: random.Random) -> None:
        self.group, self.dice = group, dice
        self.payments: dict[str, Payment] = {}
        self.calls: list[Call] = []
        # Requests that clients send later, perhaps several times, and perhaps to the wrong master. A Payment stands for
        # its half message.
        self.late: list[Payment | EndTransactionRequest] = []
        self.seen, self.counts = Observations(), Counter[str]()

    def step(self, master: Replica) -> None:
        """Send one request, or run one round of checks, at a master."""
        self.dice.choices((self.begin, self.send_late, self.end_again, self.check), (5, 5, 3, 1))[0](master)

    # Requests to a master

    def begin(self, master: Replica) -> None:
        number = len(self.payments)
        name = f"{number:06d}"
        batch = half_batch(
            [Message("orders", name.encode())],
            ids=[name],
            queue_id=self.dice.randrange(QUEUES),
            producer=ProducerSequence(f"payer {number}", 0, 0),
        )
        self.payments[name] = Payment(name, batch)
        self.send(master, self.payments[name])

    def send_late(self, master: Replica) -> None:
        if self.late:
            index = self.dice.randrange(len(self.late))
            self.send(master, self.late[index])
            if self.dice.random() >= SENT_AGAIN:
                del self.late[index]

    def end_again(self, master: Replica) -> None:
        """Send an end of any transaction with an outcome, with any offsets that its half message had once."""
        decided = [one for one in self.payments.values() if one.commits is not None and one.places]
        if decided:
            payment = self.dice.choice(decided)
            self.send(master, payment.order(self.dice.choice(payment.places)))

    def check(self, master: Replica) -> None:
        """Let a master ask the producers, who answer later, or both now and later."""
        for question in master.any_store.transactions.check([GROUP]).checks:
            payment = self.payments[question.transaction_id]
            # A producer that is asked before its local transaction ran keeps the transaction from committing.
            payment.decide(False)
            payment.places.append((question.queue_offset, question.physical_offset))
            end = payment.order(payment.places[-1], checked=True)
            self.counts["checked"] += 1
            self.late.append(end)
            if self.dice.random() < 0.5:
                self.send(master, end)

    def send(self, master: Replica, request: Payment | EndTransactionRequest) -> None:
        begin_s = time.monotonic()
        if isinstance(request, Payment):
            self.calls.append(Call(request, master.start_append([request.batch]), begin_s))
            return
        try:
            started = master.start_end(request, require_topic=lambda topic: None)
        except TransactionError:
            # The offsets belong to a half message, or to a copy of one, that a failover removed.
            self.counts["refused"] += 1
            return
        self.calls.append(Call(self.payments[request.transaction_id], started, begin_s, request))

    # Answers of a master

    def settle(self) -> None:
        """Copy the master's log until all requests to the master are answered. Then read the topic."""
        eventually(self._all_answered, "an answer to each request")
        self.read(self.group.master)

    def time_out(self) -> None:
        """Let all requests without an answer time out, as requests to an old master do."""
        for call in self.calls:
            self._take(call, late=True)
        self.calls.clear()

    def _all_answered(self) -> bool:
        for name in sorted(self.group.replicas):
            self.group.copy(name)
        self.calls = [call for call in self.calls if not self._take(call)]
        return not self.calls

    def _take(self, call: Call, *, late: bool = False) -> bool:
        """Take the answer to a request. Returns False if there is no answer yet, and `late` is False."""
        try:
            results = give_up(call.started) if late else call.started.settle(time.monotonic())
        except RaymqError:
            self._repeat(call)
            return True
        if results is None:
            return False
        [result] = results
        if call.end is not None:
            self._ended(call, call.end, result)
        else:
            self._stored(call.payment, result)
        return True

    def _stored(self, payment: Payment, result: AppendResult) -> None:
        payment.places.append((result.queue_offset, result.physical_offset))
        # A producer runs the local transaction only if the half message is as durable as requested.
        payment.decide(result.status is SendStatus.SEND_OK and self.dice.random() < COMMITTED)
        self.late.append(payment.order(payment.places[-1]))

    def _ended(self, call: Call, end: EndTransactionRequest, result: AppendResult) -> None:
        if result.status is not SendStatus.SEND_OK:
            self._repeat(call)
            return
        self.counts["repeated" if result.duplicate else "ended"] += 1
        assert isinstance(result, EndResult)
        body = call.payment.name.encode()
        if end.commit_or_rollback == State.COMMIT_MESSAGE:
            place = MessageQueue(result.topic, "broker-a", result.queue_id), result.queue_offset
            self.seen.add(Observation(Seen.ACKNOWLEDGED, call.begin_s, time.monotonic(), *place, body))
        else:
            self.seen.add(Observation(Seen.ABORTED, call.begin_s, time.monotonic(), text=body))

    def _repeat(self, call: Call) -> None:
        """The outcome of a request is unknown, so its client sends it again later."""
        self.counts["unknown"] += 1
        self.late.append(call.end or call.payment)

    def read(self, replica: Replica) -> None:
        """Read all messages that a replica shows to consumers. Only the master's end counts as the queue's end."""
        store = replica.any_store
        for queue_id in range(QUEUES):
            queue, begin_s = MessageQueue("orders", "broker-a", queue_id), time.monotonic()
            messages, end_s = read_queue(store, "orders", queue_id), time.monotonic()
            if replica is self.group.master:
                self.seen.add(Observation(Seen.TAIL, begin_s, end_s, queue, len(messages)))
            for one in messages:
                self.seen.add(Observation(Seen.READ, begin_s, end_s, queue, one.queue_offset, one.body, "reader"))


def run_without_fault(clients: Clients) -> None:
    for _ in range(clients.dice.randint(*BETWEEN_FAULTS)):
        clients.step(clients.group.master)
        if clients.dice.random() < SETTLED:
            clients.settle()


def kill_master(clients: Clients) -> None:
    """Close the master while it works on requests. It returns with all its records, also those without an
    acknowledgement."""
    old = clients.group.fail_over()
    clients.time_out()
    clients.group.open(old)


def cut_off_master(clients: Clients) -> None:
    """Cut off the master. Some clients call the old master, and some the new one. Then the old master returns."""
    group, dice = clients.group, clients.dice
    old = group.cut_off[group.cut_off_master()]
    to_old, clients.calls = clients.calls, []
    for _ in range(dice.randint(*BETWEEN_FAULTS)):
        if dice.random() < 0.5:
            to_new, clients.calls = clients.calls, to_old
            clients.step(old)
            to_old, clients.calls = clients.calls, to_new
        else:
            clients.step(group.master)
        if dice.random() < SETTLED:
            clients.settle()
    clients.settle()
    clients.read(old)
    clients.calls = to_old
    clients.time_out()
    group.rejoin()


def end_all(clients: Clients) -> None:
    """Send every late request once more, and let the master check until each transaction has an outcome."""
    master = clients.group.master
    for request in clients.late.copy():
        clients.send(master, request)
    clients.settle()

    def none_waits() -> bool:
        for question in master.any_store.transactions.check([GROUP]).checks:
            payment = clients.payments[question.transaction_id]
            payment.decide(False)
            place = question.queue_offset, question.physical_offset
            clients.send(master, payment.order(place, checked=True))
        clients.settle()
        return not master.any_store.transactions.figures().waiting

    eventually(none_waits, "an outcome of each transaction")


def run(root: Path, seed: int, count: int) -> None:
    """Run `count` transactions over failovers of one broker group, and check what its replicas have at the end."""
    dice, faults = random.Random(seed), Counter[str]()
    group = LocalReplicas(root, transaction_time_out_ms=1, transaction_check_max=10_000)
    try:
        clients = Clients(group, dice)
        group.settle()
        while len(clients.payments) < count:
            run_without_fault(clients)
            fault = dice.choice((kill_master, cut_off_master))
            faults[fault.__name__] += 1
            fault(clients)
            group.settle()
            clients.settle()
        end_all(clients)
        group.settle()
        committed = Counter(one.name.encode() for one in clients.payments.values() if one.commits)
        print(
            f"seed {seed}: {len(clients.payments)} transactions, {committed.total()} committed", faults, clients.counts
        )
        for replica in group.replicas.values():
            messages = [one for queue_id in range(QUEUES) for one in read_queue(replica.any_store, "orders", queue_id)]
            assert Counter(one.body for one in messages) == committed
        for one in clients.payments.values():
            if not one.commits:
                clients.seen.add(Observation(Seen.ABORTED, 0.0, 0.0, text=one.name.encode()))
        check_log(clients.seen, dice, [rule for rule in RULES if rule != "commit went back"])
        assert committed.total() > count / 4
        assert min(faults.total(), clients.counts["repeated"], clients.counts["unknown"]) > 0
    finally:
        group.end()


@pytest.mark.timeout(300 + COUNT // 4)
def test_each_transaction_ends_once_over_changes_of_the_master() -> None:
    first = chaos_seed()
    for number, begun in enumerate(range(0, COUNT, OF_A_GROUP)):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            try:
                run(Path(directory), first + number, min(OF_A_GROUP, COUNT - begun))
            except (AssertionError, RaymqError) as error:
                error.add_note(f"RAYMQ_CHAOS_SEED={first + number} RAYMQ_CHAOS_TRANSACTIONS={OF_A_GROUP}")
                raise
