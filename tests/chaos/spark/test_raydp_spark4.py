"""Tests of RayDP's pre-release on Spark 4, in an environment with the extra `spark4`: reads, writes, streams and the
jobs give the results that they give on Spark 3.5, and `format("raymq")` works in the same session."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.chaos.spark import raydp4_program
from tests.support.clusters.cluster import sandbox, user_environment
from tests.support.spark.spark4 import java_home, raydp4_python

pytestmark = pytest.mark.timeout(1800)  # The first run downloads Spark 4 and RayDP, and builds raymq's wheel.

PROGRAM_S = 900


def test_reads_writes_streams_and_jobs_run_on_spark_4(tmp_path: Path) -> None:
    environ = {**user_environment(), "JAVA_HOME": java_home()}
    python = raydp4_python(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(Path(str(raydp4_program.__file__)).read_text())
    with sandbox() as box:
        done = subprocess.run(
            [str(python), str(program), str(box.root / "program")],
            cwd=box.work,
            env={**environ, "HOME": str(box.home), "TMPDIR": str(box.tmp)},
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = json.loads(done.stdout)
    messages = raydp4_program.MESSAGES
    assert found.pop("spark").startswith("4.2.")
    assert found.pop("raydp").startswith("1.7.")
    assert found == {
        "tags": {"a": messages // 2, "b": messages // 2},
        "rows_of_a_filter": messages // 2,
        "written": [messages, True],
        "sorted": True,
        "batches": [[500, 500, 200], []],
        "lag": [[0], [0]],
        "sunk": True,
        "topic-stats": [messages, 7],
        "archive": [messages, 0],
        "windowed-counts": True,
        "counted": messages,
        "replay": messages,
        "replayed": True,
        "format": [messages // 2, True],
        "formatted": True,
        "streamed": True,
    }
