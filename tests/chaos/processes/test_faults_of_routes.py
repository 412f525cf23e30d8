"""Tests of routes during two overlapping faults. The faults remove routes from the NameServers; after the last repair
the NameServers have these routes again."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray

import raymq
from actors.nameserver import WARM_UP_S
from raymq.client.consumer.push.subscription import PushSubscription
from raymq.common.message import MessageExt
from raymq.common.names import NAMESPACE
from tests.support.clusters.cluster import actor_processes, kill_actors, poll_until
from tests.support.clusters.faults import standing_still
from tests.support.history.listener_notes import ListenerNotes
from tests.support.history.waiting import eventually

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
TIMEOUT_S = 60.0
KEYS = 20


def test_a_pull_actor_that_is_restarted_while_no_nameserver_answers_reads_when_one_does(
    mq: raymq.Client, tmp_path: Path
) -> None:
    notes = ListenerNotes(tmp_path / "notes")

    def listen(message: MessageExt) -> None:
        notes.write(message.body.decode())

    mq.admin.create_topic("unread", queues=4)
    push = mq.push_consumer("unread-group", consume_from=FIRST).subscribe("unread").on_message(listen)
    with mq.producer() as producer, push.start() as subscription:
        producer.send(raymq.Message("unread", b"0"))
        eventually(lambda: notes.lines() == ["0"], "the first message")
        with standing_still(*(process.pid for process in actor_processes("NameServer"))):
            kill_actors("Pull")
            producer.send_batch([raymq.Message("unread", b"%d" % number) for number in range(1, 100)])
            eventually(lambda: begun(subscription), "the queues at the new Pull actor")
            kill_actors("NameServer")
        eventually(lambda: len(set(notes.lines())) == 100, "the rest of the messages")


def begun(subscription: PushSubscription) -> bool:
    """Return True if the consumer's Pull actor reads all four queues of the topic now."""
    try:
        [status] = subscription.status()
    except raymq.RaymqError:
        return False
    mine = [queue.state for queue in status.queues if queue.queue.topic == "unread"]
    return mine == ["pulling"] * 4


def nameservers_know_by_themselves() -> bool:
    """Return True if every NameServer has run for longer than the time for which it waits for brokers to
    register."""
    ages_s = [time.time() - process.create_time() for process in actor_processes("NameServer")]
    return bool(ages_s) and min(ages_s) > WARM_UP_S + 2


@pytest.mark.timeout(300)
def test_clients_wait_for_the_topics_of_a_broker_that_cannot_register(mq: raymq.Client) -> None:
    """A new client waits for the routes of a broker that cannot register at the NameServer. The broker cannot register
    because its store's process is stopped while the broker and the NameServer restart."""
    mq.admin.create_topic("keyed", queues=4)
    ray.get(ray.get_actor("broker-b", namespace=NAMESPACE).create_topic.remote("there-only", 1, 1))
    with mq.producer() as producer:
        before = {key: producer.send(raymq.Message("keyed", b"1"), sharding_key=key).queue for key in range(KEYS)}
    assert {queue.broker_name for queue in before.values()} == {"broker-a", "broker-b"}
    store = ray.get(ray.get_actor("storage-broker-b-0", namespace=NAMESPACE).describe.remote()).pid
    with ThreadPoolExecutor(2) as threads, raymq.connect() as fresh, fresh.producer(send_timeout_s=TIMEOUT_S) as late:
        with standing_still(store):
            kill_actors("NameServer")
            kill_actors("Broker")
            eventually(lambda: brokers(fresh) == ["broker-a"], "the broker that can register")
            eventually(nameservers_know_by_themselves, "the end of the NameServers' patience")
            keyed = {key: late.send_async(raymq.Message("keyed", b"2"), sharding_key=key) for key in range(KEYS)}
            here = [key for key in range(KEYS) if before[key].broker_name == "broker-a"]
            assert {keyed[key].result(TIMEOUT_S).queue for key in here} == {before[key] for key in here}
            with pytest.raises(raymq.ServiceNotAvailableError, match="broker-b has not registered again"):
                fresh.routes.get("there-only")
            sent = threads.submit(late.send, raymq.Message("there-only", b"x"))
            assert not any(keyed[key].done() for key in keyed if key not in here)
        assert {key: future.result(TIMEOUT_S).queue for key, future in keyed.items()} == before
        assert sent.result(TIMEOUT_S).queue.broker_name == "broker-b"
        with fresh.pull_consumer("late", consume_from=FIRST) as consumer:
            consumer.subscribe("there-only")
            assert [message.body for message in poll_until(consumer, 1)] == [b"x"]
        with pytest.raises(raymq.TopicNotExistError):
            late.send(raymq.Message("nowhere", b"x"))


def brokers(client: raymq.Client) -> list[str]:
    try:
        return sorted(client.routes.brokers())
    except raymq.RaymqError:
        return []
