"""Test of where Spark reads a topic: two machines each have a broker group and an executor. Each offset range is read
on the machine that stores the range."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters.network import PORT, WHY_IMPOSSIBLE, network

NAMES = ("head", "left")
PROGRAM = Path(__file__).with_name("read_places.py")
SETTINGS = """\
broker_groups: 2
data_dir: ~/.raymq/store
store:
  mapped_file_size_commit_log_bytes: 1048576
  mapped_file_size_consume_queue_bytes: 60000
"""

pytestmark = [pytest.mark.skipif(bool(WHY_IMPOSSIBLE), reason=WHY_IMPOSSIBLE), pytest.mark.timeout(600)]


def notes(directory: Path) -> list[dict[str, Any]]:
    """Return the contents of the JSON files that the reading tasks wrote into `directory`."""
    return [json.loads(path.read_text()) for path in directory.iterdir()]


def test_each_part_is_read_from_the_mapped_files_of_its_node(tmp_path: Path) -> None:
    with network(tmp_path, NAMES) as machines:
        head = NAMES[0]
        machines.start_ray()
        (machines.root(head) / "raymq.yaml").write_text(SETTINGS)
        print(machines.run(head, "raymq", "up", "--config", "/root/raymq.yaml", "--wait-nodes", str(len(NAMES))))
        address = f"RAY_ADDRESS={machines.address(head)}:{PORT}"
        output = machines.run(head, "env", address, sys.executable, str(PROGRAM), str(tmp_path))
        print(output)
        said = json.loads(output.splitlines()[-1])
        hosts = {machines.address(name) for name in NAMES}
    assert set(said["leaders"].values()) == hosts
    assert said["rows"] == {"asked": said["messages"], "elsewhere": said["messages"]}
    asked, elsewhere = notes(tmp_path / "asked"), notes(tmp_path / "elsewhere")
    assert len(asked) == len(elsewhere) > 2 * len(hosts)
    for task in asked:
        assert {said["leaders"][broker] for broker in task["brokers"]} == {task["host"]}
        assert task["mapped"] == task["brokers"]
    # These tasks ran on other nodes than the stores, so they read over lanes (direct socket connections), not from
    # files.
    for task in elsewhere:
        assert {said["leaders"][broker] for broker in task["brokers"]} == hosts - {task["host"]}
        assert task["mapped"] == []
