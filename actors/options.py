"""Ray's options for raymq's actors."""

from __future__ import annotations

from typing import Any, Final

from raymq.common.names import NAMESPACE

PERSISTENT: Final[dict[str, Any]] = {
    "namespace": NAMESPACE,
    "lifetime": "detached",  # outlives the launcher that created it
    "max_restarts": -1,  # Ray restarts a killed process
    "max_task_retries": 0,  # a failed call may have run; the caller decides which calls are safe to repeat
    "num_cpus": 0,  # servers wait for work; the CPUs stay with the users' tasks
}
