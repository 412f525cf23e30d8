"""The endpoints of tasks of Ray Serve: send a task to a task queue, and read its state.

A task and its states are messages (`raymq.serve.task_messages`), so any gateway process answers about any task. The
topics of the queue must exist: the deployment creates them when it starts. A new task has an id that the gateway makes,
so a repeated request makes a second task.

A task with a web hook has a message with its URL in the result topic, which is stored before the task. So the end of
each such task finds the URL (`raymq.gateway.webhooks`).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Final, Protocol
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from raymq.client.client import Client
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import Message
from raymq.common.protocol.route import TopicRoute
from raymq.gateway.calls import CallContext
from raymq.gateway.clients.access import GatewayAccess, reads, sends
from raymq.gateway.convert.names import namespace_of, topic_of
from raymq.gateway.convert.statuses import CallRefusedError
from raymq.gateway.http.answers import json_answer
from raymq.gateway.http.bodies import RequestBodies
from raymq.gateway.http.calls import NAMESPACE, call_of
from raymq.gateway.http.requests import deliver_at, only, parsed
from raymq.gateway.http.shapes import NewTask, TaskAnswer
from raymq.gateway.service.cluster import GatewayCluster
from raymq.gateway.webhooks.ends import WEBHOOK_ID_PREFIX
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code
from raymq.remoting.namespaced_routes import NamespacedRoutes
from raymq.serve.config import RESULTS_SUFFIX
from raymq.serve.states import StateRecord, TaskHistory, TaskState
from raymq.serve.task import Task, is_task_id
from raymq.serve.task_messages import (
    TaskWebhook,
    state_message,
    task_history,
    task_message,
    task_priority,
    webhook_message,
)

RESULT_TTL_S: Final = 86_400.0
"""Time in seconds for which the state of an ended task is returned: the default of Ray Serve's adapter."""

Histories = Callable[[str, str], TaskHistory]
"""Returns the history of a task from a result topic and the task's id. The call blocks."""


class TaskWebhooks(Protocol):
    """The web hooks of this gateway (`raymq.gateway.webhooks.deliveries.WebhookDeliveries`)."""

    def check(self, url: str) -> None: ...
    async def register(self, topic: str) -> None: ...


def histories_of(client: Client) -> Histories:
    """Return the function that reads the histories of tasks with a client."""
    routes = NamespacedRoutes(client.routes, client.names)
    return lambda results, task_id: task_history(routes, client.admin, results, task_id)


class TaskCalls:
    """The endpoints of tasks. `webhooks`: the web hooks at the ends of tasks; None if they are off."""

    def __init__(
        self,
        cluster: GatewayCluster,
        access: GatewayAccess,
        bodies: RequestBodies,
        histories: Histories,
        webhooks: TaskWebhooks | None = None,
    ) -> None:
        self._cluster, self._access, self._bodies, self._histories = cluster, access, bodies, histories
        self._webhooks = webhooks

    async def send(self, request: Request) -> Response:
        """Store a task, its first state, and its web hook if it has one. All are durable when the answer arrives."""
        only(request.query_params)
        call = self._access.authenticated(call_of(request))
        async with self._bodies.read(request, messages=1) as body:
            asked: NewTask = parsed(body, NewTask)
            queue, results = _topics(call, asked.queue, asked.result_topic)
            self._access.require(call, sends(queue), sends(results))
            route = await self._cluster.route(queue)
            await self._cluster.route(results)
            now_s, prefix = time.time(), ""
            if asked.webhook is not None:
                await self._allow_webhook(call, results, asked.webhook)
                prefix = WEBHOOK_ID_PREFIX
            task = Task.of(prefix + uuid.uuid4().hex, asked.name, asked.args, asked.kwargs, now_s)
            due_ms = deliver_at(asked.delay_s, asked.deliver_at_ms, round(now_s * 1000))
            message = task_message(queue, task, due_ms, _priority(asked, route, due_ms))
            state = StateRecord.of(task, TaskState.PENDING, now_s)
            told = state_message(results, state, state.encode())
            before: list[Message] = []
            if asked.webhook is not None:
                before.append(webhook_message(results, TaskWebhook(task.id, asked.webhook, asked.queue)))
            sent = [message, told, *before]
            self._access.take_sent(call, sum(len(one.body) for one in sent), len(sent))
            producer = self._cluster.producer
            for one in before:
                await producer.send(one, sharding_key=task.id)
            await asyncio.gather(
                producer.send(message, sharding_key=asked.sharding_key), producer.send(told, sharding_key=task.id)
            )
        query = {"queue": asked.queue} | ({} if asked.result_topic is None else {"result_topic": asked.result_topic})
        return json_answer(_answer(state), 202, Location=f"/v1/tasks/{task.id}?{urlencode(query)}")

    async def _allow_webhook(self, call: CallContext, results: str, url: str) -> None:
        """Check that a task may have a web hook, and let the gateways receive the task's end.

        A web hook reports the result, so its user needs the right to read results. Raises CallRefusedError if web hooks
        are off.
        """
        self._access.require(call, reads(results))
        if self._webhooks is None:
            raise CallRefusedError(
                Code.FORBIDDEN,
                "web hooks are off: name the hosts that they may call in the setting gateway.webhook_hosts",
            )
        self._webhooks.check(url)
        await self._webhooks.register(results)

    async def state(self, request: Request) -> Response:
        """Return the state of a task. Raises CallRefusedError if the task is unknown, or ended long ago."""
        query, task_id = request.query_params, request.path_params["task"]
        only(query, "queue", "result_topic")
        call = self._access.authenticated(call_of(request))
        if not query.get("queue"):
            raise CallRefusedError(Code.BAD_REQUEST, "the parameter queue, the task's queue, is missing")
        if not is_task_id(task_id):
            raise CallRefusedError(Code.BAD_REQUEST, f"{task_id!r:.100} is not the id of a task")
        _, results = _topics(call, query["queue"], query.get("result_topic"))
        self._access.require(call, reads(results))
        await self._cluster.route(results)
        history = await self._cluster.call(self._histories, results, task_id)
        state = history.told(time.time(), RESULT_TTL_S)
        if state is None:
            raise CallRefusedError(
                Code.NOT_FOUND,
                f"queue {query['queue']!r} has no task {task_id!r}, or the task ended more than 1 day ago",
            )
        return json_answer(_answer(state))


def _topics(call: CallContext, queue: str, results: str | None) -> tuple[str, str]:
    """Return the stored names of the topics of a task queue and of its results."""
    resources = wire.Resource(name=queue), wire.Resource(name=results or queue + RESULTS_SUFFIX)
    namespace = namespace_of(resources[0], call.metadata[NAMESPACE])
    return topic_of(namespace, resources[0]), topic_of(namespace, resources[1])


def _priority(asked: NewTask, route: TopicRoute, due_ms: int | None) -> int | None:
    """Return the priority of a task's message; None if the queue has no priorities. Raises CallRefusedError if the
    task's options do not fit the queue."""
    is_placed = due_ms is not None or asked.sharding_key is not None
    try:
        return task_priority(asked.priority, has_priorities=route.attributes.has_levels, is_placed=is_placed)
    except InvalidArgumentError as error:
        raise CallRefusedError(Code.BAD_REQUEST, str(error)) from None


def _answer(state: StateRecord) -> TaskAnswer:
    return TaskAnswer(
        id=state.task_id,
        state=state.state.value,
        at_s=state.at_s,
        created_at_s=state.created_at_s,
        attempt=state.attempt,
        result=state.result,
    )
