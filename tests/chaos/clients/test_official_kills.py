"""Test of RocketMQ's official clients while gateways, brokers and masters are killed, for RAYMQ_CHAOS_SECONDS (default
120) with each client.

A client sends to message groups of a topic in order, and a push consumer of the same client consumes. No acknowledged
message is lost, no message is stored twice, and the acknowledged messages of a message group keep their order, in the
queues and at the consumer. A send that the client gives up is stored once or not at all. RAYMQ_CHAOS_SEED repeats the
order of a run's faults.

The test is long, because a killed gateway's leases end after 60 s. `tests/chaos/processes/test_kill_gateways.py` is the
short one, with a client of its own.
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import raymq
from raymq.common.message import MessageQueue
from raymq.common.protocol.group import GroupConfig
from tests.support.cases import SUMMARY, chaos_seed
from tests.support.clusters.cluster import one_group
from tests.support.gateway.faults import KINDS, GatewayFaults
from tests.support.gateway.gateways import running_gateway
from tests.support.gateway.official import InstallError, or_skip
from tests.support.gateway.official_client import OfficialClient, official_client
from tests.support.history.checker import check
from tests.support.history.history import Operation, Outcome, Sent
from tests.support.history.waiting import eventually
from tests.support.history.workload import read_back
from tests.support.replicas.ray_replicas import RayReplicas

SECONDS = float(os.environ.get("RAYMQ_CHAOS_SECONDS", "120"))
REPLICAS = 3
SETTINGS = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}")
PROCESSES = 2
GROUPS = 8
"""Number of message groups. Each group has one send in flight."""
PAUSE_S = 0.05
BETWEEN_FAULTS = 3
"""Number of messages of each message group that are acknowledged between two faults."""
PATIENCE_S = 180.0
"""Longer than three attempts of a send, and than the lease of 60 s of a gateway that was killed."""

pytestmark = [
    pytest.mark.timeout(1800 + 2 * int(SECONDS)),  # The first run installs the clients.
    pytest.mark.skipif(os.environ.get("RAYMQ_SOAK") != "1", reason="one of the long runs: `make soak`"),
]


@pytest.fixture(params=["python", "node"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OfficialClient]:
    try:
        with official_client(request.param, tmp_path / request.param) as client:
            yield client
    except InstallError as error:
        or_skip(error)


def test_killed_gateways_brokers_and_masters_lose_double_and_reorder_nothing_of_official_clients(
    mq: raymq.Client, client: OfficialClient, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    dice, replicas = random.Random(chaos_seed()), RayReplicas("broker-a", REPLICAS)
    replicas.settled()
    topic = f"kills-{client.language}-{secrets.token_hex(4)}"
    group, producer, consumer = f"{topic}-group", f"{topic}-producer", f"{topic}-push"
    mq.admin.create_topic(topic, queues=4, message_type="FIFO")
    mq.admin.create_group(GroupConfig(group, retry_max_times=1000))
    faults = GatewayFaults(replicas, dice)

    def progress() -> None:
        """Wait until each message group has some more acknowledged messages."""
        wanted = [count + BETWEEN_FAULTS for count in client.call("load_counts", name=producer)]
        eventually(
            lambda: all(
                count >= least for count, least in zip(client.call("load_counts", name=producer), wanted, strict=True)
            ),
            f"{BETWEEN_FAULTS} more messages of each group",
            PATIENCE_S,
        )

    with running_gateway(tmp_path, f", processes: {PROCESSES}") as gateway:
        client.call("open_producer", name=producer, endpoints=gateway.endpoints, topics=[topic])
        client.call("open_push", name=consumer, endpoints=gateway.endpoints, group=group, topic=topic)
        client.call("start_load", name=producer, topic=topic, prefix="group", pause_s=PAUSE_S, groups=GROUPS)
        progress()
        until_s = time.monotonic() + SECONDS
        while time.monotonic() < until_s or not set(KINDS) <= set(faults.kills):
            for kind in dice.sample(KINDS, len(KINDS)):
                faults.inject(kind)
                progress()
        load = client.call("end_load", name=producer)
        assert load["ended"]
        acknowledged = {Sent.parse(body.encode()) for body, *_ in load["sent"]}
        unknown = {Sent.parse(body.encode()) for body, *_ in load["failed"]}
        ended_s = time.monotonic()

        def consumed() -> list[Sent]:
            return [Sent.parse(one["body"].encode()) for one in client.call("records", name=consumer)]

        eventually(lambda: acknowledged <= set(consumed()), "all messages at the consumer", PATIENCE_S)
        drained_s, records = time.monotonic() - ended_s, consumed()
        eventually(lambda: mq.admin.group_summary(group).lag == 0, "acknowledgements of all messages", PATIENCE_S)
    replicas.settled()
    queues = read_back(mq, topic)
    report = check(operations(acknowledged, unknown, queues), queues)
    # a send that the client gave up may be stored after later messages
    in_order = check(operations(acknowledged, set(), queues), only(acknowledged, queues))
    first = [sent for sent in dict.fromkeys(records) if sent in acknowledged]
    twice = sum(count > 1 for count in Counter(records).values())
    text = (
        f"{client.language}: kills {dict(faults.kills)}, {report}, {twice} delivered again, "
        f"drained in {drained_s:.1f} s, failed sends {Counter(error[:60] for *_, error in load['failed'])}"
    )
    print(text)
    record_property(SUMMARY, text)
    assert (report.lost, report.duplicated, report.unexpected) == (0, 0, 0)
    assert in_order.reordered == 0
    by_group: dict[int, list[Sent]] = defaultdict(list)
    for sent in first:
        by_group[sent.producer].append(sent)
    assert {number: order for number, order in by_group.items() if order != sorted(order)} == {}


def only(wanted: set[Sent], queues: Mapping[MessageQueue, Sequence[Sent]]) -> dict[MessageQueue, list[Sent]]:
    """Return the queues with only the wanted messages."""
    return {queue: [sent for sent in messages if sent in wanted] for queue, messages in queues.items()}


def operations(
    acknowledged: set[Sent], unknown: set[Sent], queues: Mapping[MessageQueue, Sequence[Sent]]
) -> list[Operation]:
    """Return the history of the sends. The clients do not return where a message is: the place is that of the stored
    message."""
    places = {sent: (queue, offset) for queue, found in queues.items() for offset, sent in enumerate(found)}
    nowhere = next(iter(queues)), -1
    return [Operation(sent, Outcome.OK, *places.get(sent, nowhere)) for sent in acknowledged] + [
        Operation(sent, Outcome.UNKNOWN) for sent in unknown
    ]
