"""The options with which raymq creates its Ray actors."""

from __future__ import annotations

from typing import Any, Final

from raymq.common.names import NAMESPACE

PERSISTENT: Final[dict[str, Any]] = {
    "namespace": NAMESPACE,
    "lifetime": "detached",  # the actor survives the launcher that created it
    "max_restarts": -1,  # Ray always restarts a process that was killed
    "max_task_retries": 0,  # no retries: a failed call may have run, and only the caller can repeat it safely
    "num_cpus": 0,  # servers mostly wait; the CPUs are left to the users' tasks
}
