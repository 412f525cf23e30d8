"""Tests of a broker group whose replicas are added, removed and replaced under load, while processes are killed and
stopped."""

from __future__ import annotations

import random

import pytest

import raymq
from raymq.common.errors import InvalidArgumentError, RaymqError
from raymq.common.names import StorageName
from raymq.remoting.actor_ref import find_actor
from storage.files.lock import DirectoryLock
from tests.support.cases import chaos_seed
from tests.support.clusters.cluster import Sandbox, kill_actors, one_group
from tests.support.history.history import History
from tests.support.history.log_rules import check_log
from tests.support.history.observations import Observations, TailWatcher
from tests.support.history.waiting import eventually
from tests.support.history.watcher import Watcher
from tests.support.history.workload import Senders, read_everything
from tests.support.replicas.ray_replicas import RayReplicas, log_checksum

BROKER = "broker-a"
BETWEEN_FAULTS = 100
CHANGE_TIMEOUT_S = 120.0
SETTINGS = one_group("{replicas: 1, enable_controller_mode: true, spread: false}")


def replicas(mq: raymq.Client) -> frozenset[int]:
    return frozenset(one.replica for one in mq.admin.replicas(BROKER).replicas)


def await_change(mq: raymq.Client, count: int) -> RayReplicas:
    """Wait until the current change has ended and all `count` replicas are in sync."""
    group = mq.admin.wait_for_replicas(BROKER, CHANGE_TIMEOUT_S)
    assert group.change == ""
    assert len(group.replicas) == count
    settled = RayReplicas(BROKER, count)
    settled.settled()
    return settled


def order(mq: raymq.Client, count: int | None, replace: int | None = None) -> None:
    """Order a change of the replicas, also while the Controller restarts. An order that got no answer may have been
    executed, so it is repeated only if no change is going on."""

    def ordered() -> bool:
        try:
            mq.admin.change_replicas(BROKER, count, replace=replace)
        except InvalidArgumentError as error:
            if "already being changed" not in str(error):
                raise
        except RaymqError:
            return False
        return True

    eventually(ordered, "the order of a change")


def test_replicas_are_added_removed_and_replaced_under_load_and_nothing_is_lost_or_doubled(
    mq: raymq.Client, box: Sandbox, topic: str, group: str
) -> None:
    seed = chaos_seed()
    history, seen = History(), Observations()
    senders = Senders(mq, topic, producers=2, count=10**6, history=history, pause_s=0.005, observations=seen)
    tails = TailWatcher(mq, topic, seen, group)

    def await_sends() -> None:
        enough = len(history) + BETWEEN_FAULTS
        eventually(lambda: len(history) >= enough, "sends that end")

    with Watcher(mq, topic, group, observations=seen) as watcher, tails:
        senders.start()
        try:
            await_sends()
            order(mq, 3)
            kill_actors("Controller")
            three = await_change(mq, 3)
            mq.admin.change_min_in_sync_replicas(BROKER, 2)
            with pytest.raises(InvalidArgumentError, match="min_in_sync_replicas and in_sync_replicas need 2"):
                mq.admin.change_replicas(BROKER, 1)
            await_sends()
            master = three.account()["master"]
            order(mq, None, replace=master)
            kill_actors("Controller")
            three.kill(master)
            await_change(mq, 3)
            assert master not in replicas(mq)
            await_sends()
            order(mq, 2)
            two = await_change(mq, 2)
            await_sends()
            assert mq.admin.replicas(BROKER).min_in_sync_replicas == 2
            shown = {"replication.replicas": 2, "replication.min_in_sync_replicas": 2}
            eventually(lambda: mq.admin.config(BROKER)[BROKER].ordered == shown, "the numbers in admin.config")
            mq.admin.change_min_in_sync_replicas(BROKER, 1)
            two.fail_over()
            await_sends()
        finally:
            senders.stop()
            senders.join(120)
        two.settled()
        stored = read_everything(mq, topic, history, watcher, more_than=BETWEEN_FAULTS * 4)
    watcher.check()
    tails.check()
    assert watcher.seen == stored
    check_log(seen, random.Random(seed))
    end, left = two.equal_end(), replicas(mq)
    assert len({log_checksum(box.data / f"{BROKER}-{replica}", end) for replica in left}) == 1
    assert {path.name for path in box.data.glob(f"{BROKER}-*")} == {f"{BROKER}-{replica}" for replica in range(4)}


def test_a_change_that_waits_says_for_what_refuses_another_change_and_is_cancelled(
    mq: raymq.Client, box: Sandbox
) -> None:
    before = replicas(mq)
    number = len(list(box.data.glob(f"{BROKER}-*")))
    # The new replica cannot open its store, because this process holds the lock of the store's directory.
    directory = box.data / f"{BROKER}-{number}"
    directory.mkdir()
    lock = DirectoryLock(directory)
    try:
        order(mq, len(before) + 1)
        waits = f"replica {number} joins: replica {number} does not answer yet"
        eventually(lambda: mq.admin.replicas(BROKER).change == waits, "what the change waits for")
        with pytest.raises(InvalidArgumentError, match="already being changed"):
            mq.admin.change_replicas(BROKER, len(before) + 2)
        mq.admin.cancel_replica_change(BROKER)
        await_change(mq, len(before))
    finally:
        lock.release()
    assert replicas(mq) == before
    gone = str(StorageName(BROKER, number))
    eventually(lambda: find_actor(gone) is None, "the end of the replica that was to join")
    with pytest.raises(InvalidArgumentError, match="not being changed"):
        mq.admin.cancel_replica_change(BROKER)
