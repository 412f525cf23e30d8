"""Rotation: tests that take minutes and take turns, so that `make chaos` runs only a third of them.

`make chaos` runs one list of ROTATION. The commit's hash chooses the list, so each run of the same commit runs the same
tests. `make soak` and a plain call of pytest run all lists. RAYMQ_ROTATION chooses a list by hand: 0, 1, 2 or all.

A file belongs here if it compares supported versions, installations or whole programs. A file does not belong here if
it proves that no acknowledged message is lost after kills, damage or power cuts of servers.
"""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

ROTATION: Final = (
    (
        "chaos/spark/test_spark4_source.py",
        "chaos/spark/test_spark4_writes.py",
        "chaos/nodes/test_ray_up.py",
        "chaos/processes/test_wheel_install.py",
    ),
    (
        "chaos/spark/test_raydp_spark4.py",
        "chaos/spark/test_kill_stream_readers.py",
        "chaos/spark/test_kill_stream_drivers.py",
        "chaos/nodes/test_executor_places.py",
        "chaos/processes/test_reopen.py",
    ),
    (
        "chaos/spark/test_kill_spark_writers.py",
        "chaos/spark/test_sessions.py",
        "chaos/spark/test_access_beside_spark.py",
        "chaos/nodes/test_node_labels.py",
    ),
)
"""Test files by list. Paths start below tests/. The lists take about equally long."""
ALL: Final = "all"
COMMIT: Final = "commit"


@cache
def chosen_list(choice: str) -> int | None:
    """Return the index of the list of ROTATION that this run includes, or None if the run includes all lists.

    `choice`: "commit" chooses by the hash of the repository's present commit, or list 0 outside a repository. Other
    values are the index of a list, or "all".
    """
    if choice == ALL:
        return None
    if choice != COMMIT:
        return int(choice) % len(ROTATION)
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return int(done.stdout, 16) % len(ROTATION) if done.returncode == 0 else 0


def rotated_out(file: str) -> bool:
    """Return True if this run leaves out a test file, because the file is in a list that the run does not include.

    `file`: path of the file below tests/.
    """
    index = chosen_list(os.environ.get("RAYMQ_ROTATION", ALL))
    return index is not None and any(file in files for at, files in enumerate(ROTATION) if at != index)
