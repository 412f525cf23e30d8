"""WebhookDeliveries calls the web hooks of tasks that have ended, in each gateway process.

    result topic ── lease ──▶ the task's stored status, its URL ──▶ call ──▶ accepted: acknowledge
                                                                       └──▶ failed: again after the group's interval,
                                                                            at last a dead letter with the reason

A gateway that is killed acknowledges nothing, so another process, or the restarted one, calls the web hook after the
lease. So each end of a task is reported at least once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from raymq.client.client import Client
from raymq.client.consumer.simple.async_pop_calls import AsyncPopCalls
from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.common.config.gateway import GatewayOptions
from raymq.common.config.webhook_hosts import WebhookHosts
from raymq.common.errors import BodyUnreadableError, RaymqError, TopicNotExistError
from raymq.common.message import PROPERTY_RETRY_TOPIC
from raymq.common.names import WEBHOOK_GROUP
from raymq.common.retry import Backoff
from raymq.gateway.convert.leases import LeaseTerms
from raymq.gateway.service.cluster import FINISH_S, GatewayCluster
from raymq.gateway.service.polling_receive import GroupCalls, PollingReceive
from raymq.gateway.webhooks.ends import FROM_FIRST, WEBHOOK_ID_PREFIX, TaskEnds, ends_of
from raymq.gateway.webhooks.event import WebhookEvent, task_ended
from raymq.gateway.webhooks.sender import WebhookFailedError, WebhookSender, read_keys
from raymq.serve.states import ENDS, StateRecord, TaskHistory, decode_state
from raymq.serve.task_messages import TaskWebhook
from raymq.telemetry.metrics.reporter import Reporter

CALLS_OF_TOPIC_MAX: Final = 16
"""Maximum number of web hooks of one result topic that one gateway process calls at the same time."""
LEASE_MS: Final = 30_000
"""Time in ms for which a gateway process has an end of a task for itself. It covers the reads and the call."""
WEBHOOK_WAIT_S: Final = 20.0
"""Time in seconds for which a receive waits for the next end."""
TOPICS_INTERVAL_S: Final = 5.0
"""Time in seconds between two looks for new result topics."""
AGAIN_MS: Final = 5_000
"""Time in ms before an end is received again whose task cannot be read now."""
WEBHOOK_THREADS: Final = 4
"""Number of threads for the blocking calls. They are not the threads of the gateway's other calls, which must not wait
for web hooks whose brokers are away."""
ACCEPTED: Final = "accepted"

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Ends(Protocol):
    """The calls about ends of tasks (`raymq.gateway.webhooks.ends.TaskEnds`). All calls block."""

    def topics(self) -> set[str]: ...
    def register(self, topic: str) -> None: ...
    def history(self, topic: str, task_id: str) -> TaskHistory: ...
    def webhook(self, topic: str, task_id: str) -> TaskWebhook | None: ...


class WebhookCaller(Protocol):
    """Calls web hooks (`raymq.gateway.webhooks.sender.WebhookSender`)."""

    async def send(self, url: str, event: WebhookEvent) -> None: ...
    def key_error(self) -> str: ...

    async def close(self) -> None: ...


class WebhookDeliveries:
    """The web hooks of one gateway process, in its event loop. Run `run` in a task; close the object after the task.

    `make_calls`: makes the calls of the group WEBHOOK_GROUP, with the threads for its blocking calls.
    """

    def __init__(
        self,
        cluster: GatewayCluster,
        ends: Ends,
        sender: WebhookCaller,
        make_calls: Callable[[Executor], GroupCalls],
        hosts: WebhookHosts,
    ) -> None:
        self._cluster, self._ends, self._sender, self._hosts = cluster, ends, sender, hosts
        self._threads = ThreadPoolExecutor(WEBHOOK_THREADS, "webhooks")
        self._calls = make_calls(self._threads)
        self._topics: dict[str, asyncio.Task[None]] = {}
        """The tasks that receive, by result topic."""
        self._changed = asyncio.Event()
        self.outcomes: Counter[str] = Counter()
        """Number of calls by outcome: ACCEPTED, or the reason of a WebhookFailedError."""
        self.dead_letters = 0
        self.running = 0
        """Number of ends that this process has received and has not settled yet."""

    def check(self, url: str) -> None:
        """Raise InvalidArgumentError or NoPermissionError if the gateway may not call a URL."""
        self._hosts.check(url)

    def key_error(self) -> str:
        """Return why no call can be signed now; empty if calls can. Any thread may call this method."""
        return self._sender.key_error()

    async def register(self, topic: str) -> None:
        """Let the gateways receive the ends of tasks in a result topic. Call this method before a task with a web hook
        is stored. Raises SystemBusyError if too many topics are registered."""
        if topic not in self._topics:
            await self._call(self._ends.register, topic)
            self._changed.set()

    async def run(self) -> None:
        """Call web hooks until the task is cancelled."""
        try:
            while True:
                await self._look()
                try:
                    async with asyncio.timeout(TOPICS_INTERVAL_S):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            tasks = list(self._topics.values())
            self._topics.clear()
            await _ended(tasks)

    async def _look(self) -> None:
        """Begin to receive from result topics that are new, and forget topics that were deleted."""
        self._changed.clear()
        try:
            topics = await self._call(self._ends.topics)
        except RaymqError as error:
            logger.info("the result topics with web hooks are unknown now: %s", error)
            return
        for topic in topics - self._topics.keys():
            self._topics[topic] = asyncio.create_task(self._serve(topic))
        gone = [task for task in self._topics.values() if task.done()]
        self._topics = {topic: task for topic, task in self._topics.items() if not task.done()}
        await _ended(gone)

    async def _serve(self, topic: str) -> None:
        """Receive the ends in a result topic, and report each in a task of its own, until the topic is deleted."""
        running: set[asyncio.Task[None]] = set()
        backoff = Backoff()
        try:
            while True:
                try:
                    messages = await self._receive(topic, CALLS_OF_TOPIC_MAX - len(running))
                    backoff.reset()
                except TopicNotExistError:
                    return
                # the topic's web hooks wait while its brokers are away; an unexpected error must not end the others'
                except Exception as error:
                    unexpected = not isinstance(error, RaymqError)
                    logger.warning("web hooks of %s wait: %s", topic, error, exc_info=unexpected)
                    await asyncio.sleep(backoff.next())
                    continue
                for message in messages:
                    task = asyncio.create_task(self._report(topic, message))
                    running.add(task)
                    task.add_done_callback(running.discard)
                if len(running) >= CALLS_OF_TOPIC_MAX:
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _ended(list(running))

    async def _receive(self, topic: str, count: int) -> list[ReceivedMessage]:
        route = await self._cluster.route(topic)
        brokers = sorted({queue.broker_name for queue in route.subscribe_queues})
        if not brokers:
            await asyncio.sleep(TOPICS_INTERVAL_S)
            return []
        terms = LeaseTerms(max(count, 1), LEASE_MS, WEBHOOK_WAIT_S)
        return await self._cluster.receive(PollingReceive(self._calls, ends_of(topic), brokers, terms))

    async def _report(self, topic: str, message: ReceivedMessage) -> None:
        """Report one end of a task, and settle its message."""
        self.running += 1
        try:
            if await self._is_done(topic, message):
                await self._calls.ack_places(await self._calls.places(topic, [message.handle]))
        except RaymqError as error:
            logger.info("an end of a task in %s is received again after its lease: %s", topic, error)
        # the message is received again after its lease, and the log has the error
        except Exception:
            logger.exception("an end of a task in %s failed", topic)
        finally:
            self.running -= 1

    async def _is_done(self, topic: str, message: ReceivedMessage) -> bool:
        """Call the web hook of a task. Returns True if the message may be acknowledged: the call was accepted, or
        there is nothing to call."""
        # a replayed dead letter comes from the group's retry topic
        topic = message.system_properties.get(PROPERTY_RETRY_TOPIC, topic)
        try:
            state = decode_state(message.body)
        except BodyUnreadableError as error:
            logger.warning("an end of a task in %s cannot be read, its web hook is not called: %s", topic, error)
            return True
        if state is None or state.state not in ENDS or not state.task_id.startswith(WEBHOOK_ID_PREFIX):
            return True
        try:
            history = await self._call(self._ends.history, topic, state.task_id)
            webhook = await self._call(self._ends.webhook, topic, state.task_id)
        except RaymqError as error:
            logger.info("task %s cannot be read now, its web hook waits: %s", state.task_id, error)
            await self._calls.change_invisible([message], AGAIN_MS, counted=False)
            return False
        ended = _ended_state(state, history)
        if webhook is None or ended is None:
            return True
        try:
            await self._sender.send(webhook.url, task_ended(webhook.queue, ended))
        except WebhookFailedError as error:
            self.outcomes[error.reason] += 1
            await self._failed(topic, message, error)
            return False
        self.outcomes[ACCEPTED] += 1
        return True

    async def _failed(self, topic: str, message: ReceivedMessage, error: WebhookFailedError) -> None:
        """Let the message be received again after the group's retry interval, or store it as a dead letter."""
        config = await self._cluster.group_config(WEBHOOK_GROUP)
        if message.attempt <= config.retry_max_times:
            logger.info("web hook of %s failed in attempt %d: %s", topic, message.attempt, error)
            await self._calls.change_invisible([message], None)
            return
        logger.warning("web hook of %s failed %d times, and is a dead letter: %s", topic, message.attempt, error)
        if await self._calls.dead_letter(topic, message.handle, message.attempt, str(error)):
            self.dead_letters += 1

    def report(self, reporter: Reporter) -> None:
        """Report the figures. Any thread may call this method."""
        for outcome, total in self.outcomes.copy().items():
            reporter.count("raymq_gateway_webhook_calls", total, outcome=outcome)
        reporter.count("raymq_gateway_webhook_dead_letters", self.dead_letters)
        reporter.gauge("raymq_gateway_webhooks_running", self.running)

    async def _call(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking call in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def close(self) -> None:
        """Close the connections, give back received messages, and end the threads. Call it once."""
        await self._sender.close()
        try:
            async with asyncio.timeout(FINISH_S):
                await self._calls.finish()
        except TimeoutError:
            logger.info("some calls for web hooks had not ended after %s s", FINISH_S)
        self._threads.submit(self._calls.close)
        self._threads.shutdown(wait=False)


def _ended_state(state: StateRecord, history: TaskHistory) -> StateRecord | None:
    """Return the end to report: the stored status of the task, which may be later than the received state. Returns None
    if the task runs again: its next end is received later."""
    latest = history.latest
    if latest is None:
        return state  # retention has deleted the states
    return latest if latest.state in ENDS else None


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def deliveries_of(client: Client, cluster: GatewayCluster, options: GatewayOptions) -> WebhookDeliveries:
    """Return the web hooks of a gateway process. `client`: a client without a namespace. Raises ConfigError if the
    secret file cannot be used."""
    hosts = WebhookHosts.parse(options.webhook_hosts)
    read_keys(options.webhook_secret)

    def make_calls(threads: Executor) -> GroupCalls:
        return AsyncPopCalls(
            WEBHOOK_GROUP,
            routes=client.routes,
            storages=client.storages,
            broker=cluster.broker,
            threads=threads,
            start=FROM_FIRST,
        )

    sender = WebhookSender(hosts, partial(read_keys, options.webhook_secret))
    return WebhookDeliveries(cluster, TaskEnds(client), sender, make_calls, hosts)
