"""RaymqLagPolicy scales the replicas of a `@task_consumer` deployment by the number of tasks that wait in raymq.

The class has the interface of Ray Serve's AsyncInferenceAutoscalingPolicy. Serve pickles this module by value and calls
the policy in its controller's event loop. Therefore the policy queries raymq in a thread, once per interval, and
imports raymq inside functions.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Any

logger = logging.getLogger(__name__)


class RaymqLagPolicy:
    """An autoscaling policy that counts each unfinished task as an ongoing request, in addition to the deployment's
    requests. The policy requests as many replicas as are needed for the target number of ongoing requests per replica.

    Use it in an AutoscalingConfig: ``policy=AutoscalingPolicy(policy_function=RaymqLagPolicy, policy_kwargs={...})``.
    `queue_name` and `group` are the task queue and consumer group of the deployment (default of `group`:
    ``serve-QUEUE``). `address` and `namespace` have the same meaning as in RaymqAdapterConfig. `poll_interval_s`: the
    time in s between two queries to raymq. Between two queries, and while raymq does not answer, the policy uses the
    last known lag.
    """

    def __init__(
        self,
        queue_name: str,
        group: str | None = None,
        address: str | None = None,
        namespace: str | None = None,
        poll_interval_s: float = 10.0,
    ) -> None:
        from raymq.common.numbers import seconds
        from raymq.serve.config import TASK_GROUP_PREFIX

        self._poll_interval_s = seconds("poll_interval_s", poll_interval_s)
        self._queue = queue_name
        self._group = group or TASK_GROUP_PREFIX + queue_name
        self._address, self._namespace = address, namespace
        self._lag = 0
        self._client: Any = None
        self._asking: threading.Thread | None = None
        self._asked_s = float("-inf")

    def __call__(self, ctx: Any) -> tuple[int | float, dict[str, Any]]:
        """Return the desired number of replicas for Ray Serve's AutoscalingContext, and the lag for Serve's log. Serve
        applies its bounds and delays to the number. Does not wait for raymq."""
        now_s = time.monotonic()
        asks = self._asking is not None and self._asking.is_alive()
        if not asks and now_s - self._asked_s >= self._poll_interval_s:
            self._asked_s = now_s
            self._asking = threading.Thread(target=self._ask, name="raymq-lag", daemon=True)
            self._asking.start()
        running, workload = ctx.current_num_replicas, ctx.total_num_requests + self._lag
        told = {"lag": self._lag}
        if not running:
            return (1 if workload else 0), told
        return workload / ctx.config.get_target_ongoing_requests(), told

    def _ask(self) -> None:
        """Query raymq for the number of tasks that no worker has finished. Runs in a separate thread, because the query
        blocks."""
        from raymq.common.errors import GroupNotExistError, RaymqError
        from raymq.serve.lag import tasks_summary

        try:
            if self._client is None:
                self._client = self._connect()
            summary = tasks_summary(self._client.admin, self._group, self._queue)
            self._lag = summary.lag + summary.retry_lag
        except GroupNotExistError:
            # The lag is 0 if the consumer group does not exist yet: no replica has started, and no task was sent.
            self._lag = 0
        except RaymqError as error:
            logger.warning("cannot read the lag of group %s, using its last known lag: %s", self._group, error)

    def _connect(self) -> Any:
        from raymq.client.client import connect
        from raymq.common.parallel import start_thread

        client = connect(self._address, namespace=self._namespace)
        # Ray Serve drops this policy object without calling a close method, so a finalizer closes the object's client.
        # The finalizer starts a thread, because the garbage collector may call it at a point where blocking is not
        # allowed.
        closer = threading.Thread(target=client.close, name="raymq-lag-close", daemon=True)
        # Do not run the finalizer at the process's exit: every client closes itself at exit.
        weakref.finalize(self, start_thread, closer).atexit = False
        return client
