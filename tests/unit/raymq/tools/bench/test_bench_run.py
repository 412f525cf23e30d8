"""Tests of a run of `raymq bench` on a cluster in memory: its phases, its failures, and what it removes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from raymq.common.errors import InvalidArgumentError, RaymqError
from raymq.tools.bench import run as runs
from raymq.tools.bench.plan import BenchOptions, BenchPhase, plan_run
from raymq.tools.bench.run import BenchRun
from raymq.tools.bench.surroundings import (
    BrokerSetup,
    broker_setups,
    check_free_space,
    local_directories,
    measure_disk,
)
from tests.unit.raymq.tools.bench.fakes import FakeCluster

OPTIONS = BenchOptions(messages=40, seconds=600.0, producers=3, consumers=2, batch=7, rate=5000.0)


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


def run_of(cluster: FakeCluster, **changes: Any) -> BenchRun:
    """Return a new run of a few messages, on the cluster in memory."""
    steps: list[str] = []
    values = {name: getattr(OPTIONS, name) for name in BenchOptions.__slots__} | changes
    run = BenchRun(cluster, plan_run(BenchOptions(**values)), steps.append)
    run.steps = steps  # type: ignore[attr-defined]
    return run


def test_each_phase_has_all_messages_and_nothing_is_left(cluster: FakeCluster) -> None:
    cluster.topics["orders"] = [b"of a user"]
    run = run_of(cluster)
    run.run()
    assert run.errors == []
    assert {one.phase: one.messages for one in run.results} == {
        BenchPhase.PUBLISH: 40, BenchPhase.BATCH: 40, BenchPhase.CONSUME: 80,
        BenchPhase.RECEIVE: 80, BenchPhase.DELAY: 40,
    }  # fmt: skip
    assert [one.latency is not None for one in run.results] == [True, True, False, False, True]
    assert all(one.bytes == one.messages * 1024 and one.seconds > 0 for one in run.results)
    assert (cluster.topics, cluster.groups, cluster.open) == ({"orders": [b"of a user"]}, set(), 0)
    assert run.objects.rest() == []
    assert run.topic.startswith("raymq-bench-")
    assert run.steps[-1] == "deleting the temporary topic"  # type: ignore[attr-defined]


def test_two_runs_have_different_topics(cluster: FakeCluster) -> None:
    assert run_of(cluster).topic != run_of(cluster).topic


def test_a_topic_of_the_user_keeps_its_messages_and_is_not_deleted(cluster: FakeCluster) -> None:
    cluster.topics["orders"] = [b"earlier"] * 10
    cluster.groups.add("billing")
    run = run_of(cluster, topic="orders")
    run.run()
    assert run.errors == []
    stored = cluster.topics["orders"]
    assert (stored[:10], len(stored)) == ([b"earlier"] * 10, 10 + 3 * 40)
    assert cluster.groups == {"billing"}
    assert [one.messages for one in run.results if one.phase is BenchPhase.CONSUME] == [80]
    assert "orders" not in cluster.deleted


def test_a_topic_that_does_not_exist_is_named(cluster: FakeCluster) -> None:
    run = run_of(cluster, topic="oders")
    run.run()
    [error] = run.errors
    assert error.startswith("preparing the topic: ")
    assert "oders" in error
    assert (run.results, cluster.topics) == ([], {})


def test_a_failed_phase_ends_the_run_and_keeps_the_earlier_figures(cluster: FakeCluster) -> None:
    count = itertools.count()

    def fail_late(message: object) -> None:
        if next(count) == 60:
            raise RaymqError("no broker answers")

    cluster.on_send = fail_late
    run = run_of(cluster)
    run.run()
    assert run.errors == ["send batches: no broker answers"]
    assert [one.phase for one in run.results] == [BenchPhase.PUBLISH]
    assert (cluster.topics, cluster.open) == ({}, 0)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_removes_the_topic_and_goes_on(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def interrupt(*_: object) -> bool:
        assert cluster.topics
        raise kind

    monkeypatch.setattr(runs.Crew, "wait", interrupt)
    run = run_of(cluster)
    with pytest.raises(kind):
        run.run()
    assert (cluster.topics, cluster.groups, cluster.open) == ({}, set(), 0)
    assert run.objects.rest() == []


def test_an_interrupt_during_the_creation_removes_the_topic(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def created_but_interrupted(name: str, queues: int) -> None:
        cluster.topics[name] = []
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster, "create_topic", created_but_interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_of(cluster).run()
    assert cluster.topics == {}


def test_an_object_that_cannot_be_deleted_is_named_with_the_command(cluster: FakeCluster) -> None:
    cluster.undeletable = {"-receive"}
    run = run_of(cluster)
    run.run()
    group = f"{run.topic}-receive"
    assert run.errors == [f"group {group!r} could not be deleted: broker-a does not answer"]
    assert run.objects.rest() == [f"group {group!r} is left; delete it: raymq group delete {group} --yes"]
    assert (cluster.topics, cluster.groups) == ({}, {group})
    cluster.undeletable = set()
    assert (run.objects.remove(), cluster.groups) == ([], set())


def test_the_command_for_an_object_in_a_namespace_names_the_namespace(cluster: FakeCluster) -> None:
    cluster.names.name = "team-a"
    cluster.undeletable = {"-poll"}
    run = run_of(cluster)
    run.run()
    [left] = run.objects.rest()
    assert left.endswith(f"delete it: raymq group delete {run.topic}-poll --yes --namespace team-a")


def test_an_interrupt_of_the_removal_leaves_the_names(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster, "delete_topic", interrupt)
    run = run_of(cluster)
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert run.objects.rest() == [f"topic {run.topic!r} is left; delete it: raymq topic delete {run.topic} --yes"]


def test_messages_that_do_not_arrive_are_an_error(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "LAST_MESSAGES_S", 0.05)
    count = itertools.count(1)

    def drop_at_the_end(message: object) -> None:
        cluster.drops = 3 * (next(count) == 3 * 40)

    cluster.on_send = drop_at_the_end
    run = run_of(cluster)
    run.run()
    [error] = run.errors
    assert error == (
        "delay from send to poll: 3 of 40 messages did not arrive within 0.05 s after the last send; see `raymq status`"
    )
    assert [one.messages for one in run.results] == [40, 40, 80, 80, 37]


def test_a_read_that_ends_at_its_time_has_a_note(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "LAST_MESSAGES_S", 0.05)
    cluster.drops = 1
    run = run_of(cluster, messages=1, seconds=1.0)
    run.run()
    sent = sum(one.messages for one in run.results[:2])
    assert sent > 0
    for read in run.results[2:4]:
        assert (read.messages, read.note) == (sent - 1, f"the time allowed {sent - 1} of {sent} messages")


def test_a_rate_that_was_not_reached_gets_a_note(cluster: FakeCluster) -> None:
    run = run_of(cluster, rate=1e9, messages=200)
    run.run()
    [published, *_] = run.results
    assert "messages/s instead of 1,000,000,000: the times include the wait of each late send" in published.note


def test_broker_groups_have_their_replicas_flush_mode_and_place(cluster: FakeCluster) -> None:
    assert broker_setups(cluster) == [
        BrokerSetup("broker-a", 2, True, "ASYNC_FLUSH", 2),
        BrokerSetup("broker-b", 1, False, error="only super users may read settings"),
    ]


def test_each_disk_with_a_store_on_this_node_is_measured_once(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.root = str(tmp_path)
    (tmp_path / "logs").mkdir()
    cluster.logs = (str(tmp_path / "logs"), "/proc")
    assert local_directories(cluster) == [tmp_path, Path("/proc")]
    cluster.logs = ()
    cluster.root = str(tmp_path / "missing")
    assert local_directories(cluster) == []


def test_the_disk_is_measured_within_its_bounds_and_no_file_is_left(tmp_path: Path) -> None:
    figures = measure_disk(tmp_path, size=16 << 20)
    assert figures.written_bytes == 16 << 20
    assert figures.write_bytes_per_s > 0
    assert 0 < figures.flush_p50_ms <= figures.flush_p99_ms
    ticks = itertools.count()
    assert measure_disk(tmp_path, max_s=1.5, clock_s=lambda: float(next(ticks))).written_bytes == 8 << 20
    assert list(tmp_path.iterdir()) == []
    assert "missing cannot be written: No such file or directory" in measure_disk(tmp_path / "missing").error


def test_a_disk_without_space_refuses_the_run(tmp_path: Path) -> None:
    check_free_space([tmp_path], 1)
    with pytest.raises(InvalidArgumentError, match="MiB free: choose smaller --messages or --size"):
        check_free_space([tmp_path], 1 << 60)
