"""The options with which raymq creates its Ray actors."""

from __future__ import annotations

from typing import Any, Final

from raymq.common.names import NAMESPACE

PERSISTENT: Final[dict[str, Any]] = {
    "namespace": NAMESPACE,
    "lifetime": "detached",  # the actor continues to run after the launcher that created it has ended
    "max_restarts": -1,  # Ray always restarts a process that was killed
    # no retries: a failed call may have been executed, and only the caller can decide whether a repetition is safe
    "max_task_retries": 0,
    "num_cpus": 0,  # reserve no CPU: servers mostly wait, so the CPUs remain available for the users' tasks
}
