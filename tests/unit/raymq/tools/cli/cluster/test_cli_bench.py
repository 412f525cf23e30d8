"""Tests of the command `raymq bench` on a cluster in memory: its table, its JSON, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from raymq.common.errors import InvalidArgumentError
from raymq.tools import cli
from raymq.tools.bench import surroundings
from raymq.tools.cli.terminal.output import out
from tests.support.clients.fakes import connect_commands
from tests.unit.raymq.tools.bench.fakes import FakeCluster

FEW = ("--messages", "20", "--rate", "5000/s")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCluster:
    made = FakeCluster()
    made.root = str(tmp_path)
    monkeypatch.setattr(surroundings, "DISK_BYTES", 1 << 20)
    connect_commands(monkeypatch, made)
    monkeypatch.setattr(out, "_width", 200)
    return made


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.cli, ["bench", *words])


def test_bench_prints_one_table_and_the_surroundings(cluster: FakeCluster, tmp_path: Path) -> None:
    done = run(*FEW)
    assert done.exit_code == 0, done.output
    for text in ("send one by one", "send batches", "poll and commit", "receive and acknowledge", "p99.9 ms"):
        assert text in done.stdout
    lines = " ".join(done.stdout.split())
    assert "broker-a: 2 replicas, ASYNC_FLUSH, min. 2 in sync; its master is on this node" in lines
    assert f"disk of {tmp_path}: " in lines
    assert (cluster.topics, list(tmp_path.iterdir())) == ({}, [])


def test_bench_prints_json(cluster: FakeCluster) -> None:
    done = run(*FEW, "--producers", "2", "--size", "100", "--json")
    assert done.exit_code == 0, done.output
    value = json.loads(done.stdout)
    assert {name: one["messages"] for name, one in value["phases"].items()} == {
        "publish": 20, "batch": 20, "consume": 40, "receive": 40, "delay": 20,
    }  # fmt: skip
    assert value["phases"]["delay"]["p50_ms"] > 0
    assert (value["producers"], value["size"], value["errors"], value["left"]) == (2, 100, [], [])
    assert value["topic"].startswith("raymq-bench-")
    assert done.stderr == ""


def test_bench_prints_what_it_cannot_delete_and_fails(cluster: FakeCluster) -> None:
    cluster.undeletable = {"-poll"}
    done = run(*FEW, "--json")
    assert done.exit_code == 1
    value = json.loads(done.stdout)
    assert len(value["phases"]) == 5
    [left] = value["left"]
    assert left in done.stderr
    assert f"raymq group delete {value['topic']}-poll --yes" in left


def test_an_interrupted_bench_prints_what_is_left(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cluster, "delete_topic", interrupt)
    done = run(*FEW)
    assert done.exit_code != 0
    assert done.stdout == ""
    [topic] = cluster.topics
    assert f"raymq: topic '{topic}' is left; delete it: raymq topic delete {topic} --yes" in done.stderr


def test_too_many_bytes_are_wrong_usage_before_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    connect_commands(monkeypatch, None)
    done = run("--messages", "10000000", "--size", "4000000")
    assert done.exit_code == 2
    assert "are more than 4 GiB: choose smaller --messages or --size" in " ".join(done.output.split())


def test_a_full_disk_refuses_the_bench_before_a_topic_exists(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surroundings, "FREE_FACTOR", 1 << 40)
    done = run(*FEW)
    assert isinstance(done.exception, InvalidArgumentError)
    assert cluster.topics == {}
