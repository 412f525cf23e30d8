"""Tests of `raymq up --wait-nodes`: its progress messages while it waits, and its error if nodes do not join."""

from __future__ import annotations

import pytest

from raymq.client.cluster import local_server
from raymq.client.cluster.local_server import await_nodes
from raymq.common.errors import ServiceNotAvailableError


def test_up_waits_until_enough_nodes_joined_and_shows_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_server, "POLL_INTERVAL_S", 0)
    joined = iter([["10.0.0.1"], ["10.0.0.1", "10.0.0.2"], ["10.0.0.1", "10.0.0.2", "10.0.0.3"]])
    said: list[str] = []
    await_nodes(3, 60, said.append, lambda: next(joined))
    assert said == ["waiting for nodes: 1 of 3 joined", "waiting for nodes: 2 of 3 joined"]


def test_more_nodes_than_asked_for_are_enough() -> None:
    await_nodes(1, 0, pytest.fail, lambda: ["10.0.0.1", "10.0.0.2"])


def test_the_error_for_missing_nodes_names_the_joined_nodes() -> None:
    with pytest.raises(
        ServiceNotAvailableError, match=r"1 of 3 nodes joined .*\(10\.0\.0\.1\), so no raymq server"
    ) as said:
        await_nodes(3, 0, pytest.fail, lambda: ["10.0.0.1"])
    assert "run `raymq up` again" in str(said.value)
