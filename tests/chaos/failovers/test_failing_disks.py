"""Disks of replicas that fail, or are too full for messages.

A put hook of the stores stands in for the disks: while a marker lies in a store's directory, each flush there fails, or
its disk counts as 95 % full.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

import raymq
from raymq.names import StorageName
from raymq.remoting.actor_ref import ActorRef
from tests.support.clusters.cluster import Sandbox, embedded, one_group, poll_until, sandbox
from tests.support.history.checker import check
from tests.support.history.history import History
from tests.support.history.waiting import eventually
from tests.support.history.workload import Senders, read_back
from tests.support.replicas.ray_replicas import RayReplicas, log_checksum

FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
BROKER = "broker-a"
REPLICAS = 3
BROKEN = "the-disk-is-broken"
FULL = "the-disk-is-full"
ENOUGH = 200
HOOK = f'''
import errno
import os

from storage.files import disk
from storage.retention import cleaner

real_flush, real_usage = disk.flush, cleaner.disk_usage


def marked(path, marker):
    parts = str(path).split("/")
    at = next((i for i, part in enumerate(parts) if part.startswith("{BROKER}-")), 0)
    return os.path.exists("/".join([*parts[: at + 1], marker]))


def flush(descriptor):
    if marked(os.readlink(f"/proc/self/fd/{{descriptor}}"), "{BROKEN}"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    real_flush(descriptor)


disk.flush = flush
cleaner.disk_usage = lambda path: 0.95 if marked(path, "{FULL}") else real_usage(path)


def allow(batch):
    return None
'''


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    place = tmp_path_factory.mktemp("hooks")
    (place / "failing_disk_hook.py").write_text(dedent(HOOK))
    hooks = '  put_hooks: ["failing_disk_hook:allow"]\n  hook_timeout_ms: 60000\n  clean_resource_interval_ms: 200\n'
    settings = one_group("{replicas: 3, spread: false, min_in_sync_replicas: 2}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(place), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))
        with sandbox(settings.replace("store:\n", f"store:\n{hooks}")) as made:
            yield made


@pytest.fixture(scope="module")
def mq(box: Sandbox) -> Iterator[raymq.Client]:
    with embedded(box) as client:
        yield client


def statuses() -> list[dict[str, object]]:
    return [ActorRef(str(StorageName(BROKER, replica))).call("status") for replica in range(REPLICAS)]


def test_a_master_whose_disk_fails_hands_over_and_comes_back(mq: raymq.Client, box: Sandbox) -> None:
    replicas = RayReplicas(BROKER, REPLICAS)
    left = replicas.settled()["master"]
    pid = replicas.pid(left)
    mq.admin.create_topic("orders", queues=4)
    history = History()
    senders = Senders(mq, "orders", producers=2, count=10**6, history=history, pause_s=0.005)
    marker: Path = box.data / f"{BROKER}-{left}" / BROKEN
    senders.start()
    try:
        eventually(lambda: len(history) >= ENOUGH, "sends that end")
        marker.touch()
        broken_s = time.monotonic()
        eventually(lambda: replicas.led()["master"] != left, "another master")
        led_s = time.monotonic() - broken_s
        before = len(history)
        eventually(lambda: len(history) >= before + ENOUGH, "sends that go on while the disk is broken")
        print(
            f"another replica led {led_s:.2f} s after the disk broke; {ENOUGH} sends took "
            f"{time.monotonic() - broken_s - led_s:.2f} s more"
        )
        marker.unlink()
        replicas.settled()
        before = len(history)
        eventually(lambda: len(history) >= before + ENOUGH, "sends with all replicas")
    finally:
        senders.stop()
        senders.join(120)
    assert replicas.pid(left) != pid
    report = check(history, read_back(mq, "orders"))
    print(report)
    assert report.violations == {}
    assert report.acknowledged > ENOUGH * 2
    end = replicas.equal_end()
    assert len({log_checksum(box.data / f"{BROKER}-{replica}", end) for replica in range(REPLICAS)}) == 1
    assert [status["disk_failure"] for status in statuses()] == [""] * REPLICAS


def test_on_a_full_disk_consumers_commit_join_and_receive_and_sends_are_refused_at_once(
    mq: raymq.Client, box: Sandbox
) -> None:
    replicas = RayReplicas(BROKER, REPLICAS)
    replicas.settled()
    mq.admin.create_topic("stock", queues=4)
    markers = [box.data / f"{BROKER}-{replica}" / FULL for replica in range(REPLICAS)]
    with mq.producer() as producer, mq.pull_consumer("old", consume_from=FIRST) as first:
        for number in range(80):
            producer.send(raymq.Message("stock", b"%d" % number))
        first.subscribe("stock")
        read = poll_until(first, 10)
        for marker in markers:
            marker.touch()
        # A replica that follows takes no messages anyway: what counts is the reason.
        eventually(
            lambda: all("95% full" in str(status["not_writable_reason"]) for status in statuses()),
            "disks that are found to be full",
        )
        assert not any(status["writable"] for status in statuses())
        began_s = time.monotonic()
        with pytest.raises(raymq.StoreNotWritableError, match="95% full"):
            producer.send(raymq.Message("stock", b"refused"))
        first.commit()
        with mq.pull_consumer("old", consume_from=FIRST) as second:  # a member more, so the queues are shared anew
            second.subscribe("stock")
            while len({message.body for message in read}) < 80:
                for consumer in (first, second):
                    read += consumer.poll(timeout_s=0.2)
                    consumer.commit()
        with mq.pull_consumer("new", consume_from=FIRST) as other:
            other.subscribe("stock")
            assert len(poll_until(other, 80)) >= 80
            other.commit()
        with mq.simple_consumer("simple", consume_from=FIRST) as simple:
            simple.subscribe("stock")
            [message, *_] = eventually(lambda: simple.receive(max_messages=1, invisible_s=60), "a lease")
            simple.ack(message)
        print(f"refused, committed, joined, rebalanced and received in {time.monotonic() - began_s:.1f} s")
        assert all(entry.committed for entry in mq.admin.describe_group("new"))
        for marker in markers:
            marker.unlink()
        eventually(lambda: producer_takes(producer), "sends after room was made")


def producer_takes(producer: raymq.Producer) -> bool:
    try:
        producer.send(raymq.Message("stock", b"again"))
    except raymq.StoreNotWritableError:
        return False
    return True
