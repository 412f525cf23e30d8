"""Tests of the lock that keeps gateways of two clusters from sharing a port."""

from __future__ import annotations

import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from placement.gateway import shared_port as module
from placement.gateway.shared_port import shared_port
from raymq.common.errors import ConfigError

PORT = 8081
OTHERS = r"port 8081 belongs to the gateway of another raymq"


def test_processes_of_one_cluster_share_a_port_and_another_cluster_gets_it_after_the_last(tmp_path: Path) -> None:
    with shared_port(PORT, "cluster-1", tmp_path):
        with shared_port(PORT, "cluster-1", tmp_path):
            for other in ("cluster-2", "cluster-10", "cluster-", ""):
                with pytest.raises(ConfigError, match=OTHERS), shared_port(PORT, other, tmp_path, timeout_s=0):
                    pass
        with pytest.raises(ConfigError, match=OTHERS), shared_port(PORT, "cluster-2", tmp_path, timeout_s=0):
            pass
        with shared_port(PORT + 1, "cluster-2", tmp_path, timeout_s=0):
            pass
    with (
        shared_port(PORT, "cluster-2", tmp_path, timeout_s=0),
        pytest.raises(ConfigError, match=OTHERS),
        shared_port(PORT, "cluster-1", tmp_path, timeout_s=0),
    ):
        pass


def test_the_last_process_deletes_the_file(tmp_path: Path) -> None:
    with shared_port(PORT, "cluster-1", tmp_path):
        with shared_port(PORT, "cluster-1", tmp_path):
            assert len(list(tmp_path.iterdir())) == 1
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_two_clusters_that_come_and_go_never_hold_a_port_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLAIM_INTERVAL_S", 0.0002)
    holders: Counter[str] = Counter()
    lock = threading.Lock()

    def come_and_go(owner: str) -> int:
        turns = 0
        for _ in range(100):
            try:
                with shared_port(PORT, owner, tmp_path, timeout_s=0.05):
                    with lock:
                        holders[owner] += 1
                        assert {name for name, count in holders.items() if count} == {owner}
                    with lock:
                        holders[owner] -= 1
                    turns += 1
            except ConfigError:
                continue
        return turns

    with ThreadPoolExecutor(4) as pool:
        turns = list(pool.map(come_and_go, ["cluster-1", "cluster-2"] * 2))
    assert sum(turns) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_somebody_else_is_an_error(tmp_path: Path) -> None:
    (tmp_path / f"raymq-gateway-{os.getuid()}-{PORT}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot reserve"), shared_port(PORT, "cluster-1", tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()
