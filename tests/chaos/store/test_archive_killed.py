"""Test of a killed archive run: after a kill at any moment the archive has only complete files, and the next run
continues it."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from raydp_jobs.jobs.archive_check import verify
from tests.support.stores.archiving import QUEUES, archive_all

ROOT = Path(__file__).parents[3]
TOTAL = sum(bounds.max_offset for bounds in QUEUES.values())
KILLS = 10
KILL_WITHIN_S = 0.05


def test_ten_runs_killed_one_after_another_leave_an_archive_with_each_message_once(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    kept, unfinished = 0, 0
    for _ in range(KILLS):
        command = [sys.executable, "-m", "tests.support.stores.archiving", str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            # Wait for one or two output lines. The archive run prints a line when it begins, and a line at the end of
            # each round.
            for _ in range(dice.randint(1, 2)):
                run.stdout.readline()
            time.sleep(dice.uniform(0.0, KILL_WITHIN_S))
            run.kill()
            unfinished += "done" not in run.stdout.read()
        report = verify(tmp_path, "orders")
        assert report.problems == ()
        assert report.messages >= kept
        kept = report.messages
    assert unfinished, "every run came to its end before it was killed"
    assert archive_all(tmp_path) == TOTAL - kept
    report = verify(tmp_path, "orders")
    assert (report.messages, report.problems) == (TOTAL, ())
    assert [queue.end_offset - queue.start_offset for queue in report.queues] == [400, 400, 400]
