"""Tests of the lock that keeps gateways of two clusters from sharing a port."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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


def test_a_file_of_somebody_else_is_an_error(tmp_path: Path) -> None:
    (tmp_path / f"raymq-gateway-{os.getuid()}-{PORT}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot reserve"), shared_port(PORT, "cluster-1", tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()
