"""Tests of bounded topics over real servers in one process, without Ray: every way to send meets the limit, producers
wait until the group consumes, and a topic with the policy drop keeps its messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = "tests.component.bounds.full_topic_program"


def test_a_full_topic_stops_every_way_to_send_until_its_group_consumes(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", PROGRAM, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    noted = dict(line.split(": ", 1) for line in ended.stdout.splitlines() if ": " in line)
    assert noted == {
        "stored when the topic is full": "10",
        "send_async": "True",
        "send_batch": "True",
        "send_table": "True",
        "delayed": "True",
        "another topic does not wait": "True",
        "transaction": "True",
        "stored while full": "0",
        "the limit holds": "True",
        "all are stored": "61",
        "messages after the skip": "100",
        "the bound is gone": "True",
        "end": "True",
    }, ended.stderr[-4000:]
