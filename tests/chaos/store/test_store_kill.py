"""Test of killed appends: a process that appends to a store directory is killed with SIGKILL, repeatedly.

After each kill the next child process opens the store (kill_server.py). Acknowledged messages are stored exactly once
and in order. Of the messages in flight only the first ones may be stored, and the child resends them.

There are 500 kills for each way to flush, and 100 with a transient store pool, which may lose the last acknowledged
messages. RAYMQ_SOAK=1 makes 5,000 kills and 1,000. RAYMQ_CHAOS_SEED repeats one run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cases import chaos_seed, rounds

KILLS = int(os.environ.get("RAYMQ_CHAOS_KILLS", rounds(500, 5000)))
SERVER = Path(__file__).with_name("kill_server.py")


@pytest.mark.timeout(300 + 2 * KILLS)
@pytest.mark.parametrize("flush", ["SYNC_FLUSH", "ASYNC_FLUSH"])
def test_acknowledged_messages_are_stored_once_and_in_order_after_every_kill(tmp_path, flush):
    seed = chaos_seed()
    command = [sys.executable, str(SERVER), str(tmp_path), flush, str(seed), str(KILLS)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    print(result.stdout)
    assert result.returncode == 0, result.stderr[-10_000:]
    assert "lost 0, out of order 0, duplicated 0" in result.stdout


@pytest.mark.timeout(300 + 2 * KILLS)
def test_a_kill_keeps_a_prefix_of_the_messages_that_only_the_pool_held(tmp_path):
    seed = chaos_seed()
    command = [sys.executable, str(SERVER), str(tmp_path), "POOL", str(seed), str(max(KILLS // 5, 1))]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    print(result.stdout)
    assert result.returncode == 0, result.stderr[-10_000:]
    assert "from the end, out of order 0, duplicated 0" in result.stdout
