"""Test of fixed roles: replica 0 is always the master, and leads again after its process was killed."""

from __future__ import annotations

import raymq
from raymq.common.message import SendStatus
from tests.support.clusters.cluster import Sandbox, one_group, poll_until
from tests.support.replicas.ray_replicas import RayReplicas, log_checksum

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
BROKER, REPLICAS, COUNT = "broker-a", 2, 50
SETTINGS = one_group(
    "{replicas: 2, spread: false, broker_role: SYNC_MASTER, in_sync_replicas: 2, slave_read_enable: true}"
)


def test_the_same_replica_leads_again_and_every_message_is_on_both(
    mq: raymq.Client, box: Sandbox, topic: str, group: str
) -> None:
    replicas = RayReplicas(BROKER, REPLICAS)
    before = replicas.settled()
    assert (before["master"], before["in_sync"]) == (0, [0, 1])
    with mq.producer() as producer, mq.pull_consumer(group, consume_from=FIRST) as consumer:
        consumer.subscribe(topic)
        for part in range(2):
            for number in range(part * COUNT, (part + 1) * COUNT):
                assert producer.send(raymq.Message(topic, b"%d" % number)).status is SendStatus.SEND_OK
            if not part:
                replicas.fail_over()
                assert replicas.settled()["master"] == 0
        assert sorted(int(m.body) for m in poll_until(consumer, 2 * COUNT)) == list(range(2 * COUNT))
    end = replicas.equal_end()
    assert len({log_checksum(box.data / f"{BROKER}-{replica}", end) for replica in range(REPLICAS)}) == 1
