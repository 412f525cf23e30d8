"""A process that appends is killed with SIGKILL, again and again, on one store directory.

After each kill the next child opens the store: what was acknowledged is there once and in order, what was under way is
there from its beginning on or not at all, and is sent again (kill_server.py).

500 kills for each way to flush, 100 with a transient store pool: there what was acknowledged last may be lost, and is
sent again. RAYMQ_SOAK=1 makes it ten times as many, RAYMQ_CHAOS_SEED repeats one run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cases import chaos_seed

SOAK = os.environ.get("RAYMQ_SOAK") == "1"
KILLS = int(os.environ.get("RAYMQ_CHAOS_KILLS", "5000" if SOAK else "500"))
SERVER = Path(__file__).with_name("kill_server.py")


@pytest.mark.timeout(300 + 2 * KILLS)
@pytest.mark.parametrize("flush", ["SYNC_FLUSH", "ASYNC_FLUSH"])
def test_what_was_acknowledged_is_there_once_and_in_order_after_every_kill(tmp_path, flush):
    seed = chaos_seed()
    command = [sys.executable, str(SERVER), str(tmp_path), flush, str(seed), str(KILLS)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    print(result.stdout)
    assert result.returncode == 0, result.stderr[-10_000:]
    assert "lost 0, out of order 0, duplicated 0" in result.stdout


@pytest.mark.timeout(300 + 2 * KILLS)
def test_of_what_only_the_pool_held_a_kill_leaves_the_beginning(tmp_path):
    seed = chaos_seed()
    command = [sys.executable, str(SERVER), str(tmp_path), "POOL", str(seed), str(max(KILLS // 5, 1))]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    print(result.stdout)
    assert result.returncode == 0, result.stderr[-10_000:]
    assert "from the end, out of order 0, duplicated 0" in result.stdout
