"""A push-consumer instance's own report, for administrators: its queues, and its listener's process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from raymq.client.consumer.push.settings import PushSettings
from raymq.common.errors import ServiceNotAvailableError
from raymq.common.members.questions import RunningInfo, RunningQueue
from raymq.remoting.actor_ref import HandleRef

STACKS_TIMEOUT_S: Final = 3.0
DIRECT_TIMEOUT_S: Final = 25.0
"""How long an administrator waits for a direct call of the listener with a message."""


def running_info(
    status: Mapping[str, Any],  # the fields of an InstanceStatus, of many types
    settings: PushSettings,
    client_id: str,
    host: str,
) -> RunningInfo:
    """Describe an instance whose PushInstance.status is `status`."""
    return RunningInfo(
        *(client_id, host, os.getpid(), status["instance"], settings.group, "PUSH", settings.message_model.value),
        settings.expressions,
        queues=tuple(_running_queue(queue) for queue in status["queues"]),
        rates=status["stats"],
        consumed=status["consumed"],
        failures=status["failures"],
        suspended=status["suspended"],
        trouble=status["listener_away"] or status["last_error"],
    )


def _running_queue(status: Mapping[str, Any]) -> RunningQueue:  # as above
    return RunningQueue(**status)


def call_listener(listener: HandleRef | None, method: str, *args: Any, timeout_s: float) -> Any:  # any result
    """Call a method of an instance's Listener actor.

    RequestTimeoutError, ServiceNotAvailableError, and errors of raymq that the method raised.
    """
    if listener is None:
        raise ServiceNotAvailableError("the listener's process has not called yet")
    return listener.call(method, *args, what="the listener's process", timeout_s=timeout_s)
