"""TaskEnds reads the ends of tasks with web hooks from the cluster, and registers the topics in which they are stored.

Web hooks need no state outside the cluster. The end of a task is a message of its result topic, so the consumer group
WEBHOOK_GROUP receives it like any message: with a lease, retries, and a dead letter after the last attempt. The group's
committed offsets also name the result topics to look at. The ids of tasks with a web hook have a prefix, by which the
group's filter selects their ends, whichever program stored them.
"""

from __future__ import annotations

import logging
from typing import Final

from raymq.client.client import Client
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import GroupNotExistError, RaymqError, SystemBusyError
from raymq.common.message import ConsumeFromWhere
from raymq.common.names import WEBHOOK_GROUP, is_internal_topic
from raymq.common.protocol.group import GroupConfig, StartOffsetQuery
from raymq.records.filters.sql import SqlFilter
from raymq.remoting.broker_client import broker_client
from raymq.remoting.namespaced_routes import NamespacedRoutes
from raymq.serve.states import ENDS, TaskHistory
from raymq.serve.task_messages import TaskWebhook, task_history, task_webhook

WEBHOOK_ID_PREFIX: Final = "hook-"
"""Prefix of the ids of tasks with a web hook."""
WEBHOOK_RETRIES: Final = 10
"""Number of calls after a failed first call, unless an operator changes the group."""
WEBHOOK_INTERVALS_S: Final = (1.0, 5.0, 30.0, 120.0, 600.0, 1800.0, 3600.0, 7200.0, 14_400.0, 28_800.0)
"""Seconds before the second call, the third call and so on, unless an operator changes the group. Together 16 h."""
RESULT_TOPICS_MAX: Final = 64
"""Maximum number of result topics with web hooks. Each takes a receive that waits at each gateway process."""
BROKER_CALL_S: Final = 10.0
"""Timeout in seconds of a call to one broker."""

_FROM_NOW: Final = StartOffsetQuery(ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET)
FROM_FIRST: Final = StartOffsetQuery(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
"""The group's start in queues that were added to a registered topic."""
_CONDITION: Final = SqlFilter(
    f"KEYS STARTSWITH '{WEBHOOK_ID_PREFIX}' AND TAGS IN ({', '.join(repr(state.value) for state in sorted(ENDS))})"
)

logger = logging.getLogger(__name__)


def ends_of(topic: str) -> Subscription:
    """Return the subscription of the ends of tasks with web hooks in a result topic."""
    return Subscription.parse(topic, _CONDITION)


class TaskEnds:
    """The blocking calls about ends of tasks. All names of topics are stored names. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._routes = NamespacedRoutes(client.routes, client.names)

    def topics(self) -> set[str]:
        """Return the registered result topics. Topics of a broker that does not answer may be missing."""
        found: set[str] = set()
        for name in self._client.routes.brokers():
            try:
                topics = broker_client(name).call("group_topics", WEBHOOK_GROUP, timeout_s=BROKER_CALL_S)
            except GroupNotExistError:
                continue
            except RaymqError as error:
                logger.info("the web hooks of broker %s are unknown now: %s", name, error)
                continue
            found.update(topic for topic in topics if not is_internal_topic(topic))
        return found

    def register(self, topic: str) -> None:
        """Let the group receive each end that is stored in a result topic from now on. Durable on return; repeating the
        call is safe, and loses no end.

        Raises SystemBusyError if RESULT_TOPICS_MAX topics are registered, and RaymqError if a broker does not answer;
        the topic may then be registered in part.
        """
        known = self.topics()
        if topic not in known and len(known) >= RESULT_TOPICS_MAX:
            raise SystemBusyError(
                f"{len(known)} result topics have tasks with web hooks, and {RESULT_TOPICS_MAX} are the maximum"
            )
        admin = self._client.admin
        try:
            admin.group_config(WEBHOOK_GROUP)
        except GroupNotExistError:
            config = GroupConfig(WEBHOOK_GROUP, retry_max_times=WEBHOOK_RETRIES, retry_intervals_s=WEBHOOK_INTERVALS_S)
            admin.create_group(config)
        route = self._routes.get(topic)
        for name in sorted({queue.broker_name for queue in route.require_all_queues()}):
            broker_client(name).call("start_receiving", WEBHOOK_GROUP, [topic], _FROM_NOW, timeout_s=BROKER_CALL_S)

    def history(self, topic: str, task_id: str) -> TaskHistory:
        """Return the history of a task in a result topic."""
        return task_history(self._routes, self._client.admin, topic, task_id)

    def webhook(self, topic: str, task_id: str) -> TaskWebhook | None:
        """Return the web hook of a task in a result topic; None if it has none."""
        return task_webhook(self._routes, self._client.admin, topic, task_id)
