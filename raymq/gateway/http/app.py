"""The HTTP face as an ASGI application: the table of endpoints, from which both the routes and the OpenAPI document are
made, and the answers to errors. `http_front_of` makes the face of one gateway process.

Without access control, requests of web pages are refused: a page that a user of this machine opens could otherwise send
and read messages through the user's browser. With access control, a page has no token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from raymq.client.admin.live_tails import Positions, Tails
from raymq.client.admin.messages import Arrived
from raymq.client.client import Client
from raymq.common.config.values import is_loopback
from raymq.gateway.calls import Handlers
from raymq.gateway.clients.access import GatewayAccess
from raymq.gateway.convert.statuses import CallRefusedError
from raymq.gateway.http.answers import PROBLEM, json_answer, problem_of
from raymq.gateway.http.bodies import RequestBodies
from raymq.gateway.http.calls import CLIENT_LEFT, MessageCalls
from raymq.gateway.http.openapi import Endpoint, QueryParameter, Webhook, document
from raymq.gateway.http.server import HttpFront
from raymq.gateway.http.shapes import (
    AckAnswer,
    AckRequest,
    ChangeAnswer,
    ChangeRequest,
    ErrorAnswer,
    LeaseAnswer,
    LeaseRequest,
    NewMessage,
    NewTask,
    SendAnswer,
    Skipped,
    StoredMessage,
    TaskAnswer,
)
from raymq.gateway.http.tails import HTTP_TAIL_RATE, HTTP_TAILS_MAX, TailCalls
from raymq.gateway.http.tasks import Histories, TaskCalls, TaskWebhooks, histories_of
from raymq.gateway.service.cluster import GatewayCluster
from raymq.gateway.webhooks.event import TASK_ENDED, WebhookEvent
from raymq.gateway.wire.enums import Code

_NUMBER: Final = {"type": "number"}
_RAW: Final = (
    QueryParameter("raw", "`true`: the whole body is one message, even if it is JSON.", {"type": "boolean"}),
    QueryParameter("tag", "The tag of a raw message."),
    QueryParameter("key", "A key of a raw message; may be repeated."),
    QueryParameter("property", "A property NAME:VALUE of a raw message; may be repeated."),
    QueryParameter("sharding_key", "Raw messages with one key are delivered in order."),
    QueryParameter("message_id", "The id of a raw message, for repeated sends."),
    QueryParameter("delay_s", "Seconds before the delivery of a raw message.", _NUMBER),
    QueryParameter("deliver_at_ms", "Time of the delivery of a raw message in ms since 1970.", {"type": "integer"}),
    QueryParameter("priority", "Priority of a raw message, 0 to 9.", {"type": "integer"}),
)
_QUEUE: Final = QueryParameter("queue", "The task queue of the task.", is_required=True)
_RESULTS: Final = QueryParameter("result_topic", "The result topic, if the deployment has its own.")

ENDPOINTS: Final[dict[str, Endpoint]] = {
    "send": Endpoint(
        "POST",
        "/v1/topics/{topic}/messages",
        "Send one message, an array of messages, or a raw body. Several messages are stored in one queue, in order.",
        NewMessage | list[NewMessage],
        SendAnswer,
        is_raw=True,
        query=_RAW,
        statuses={200: "Stored.", 202: "Stored, but less durable than promised; see each `code`."},
    ),
    "tail": Endpoint(
        "GET",
        "/v1/topics/{topic}/tail",
        "Stream the messages that arrive from now on, as server-sent events.",
        query=(QueryParameter("tags", "Such as `paid || refunded`."),),
        events={"message": StoredMessage, "skipped": Skipped, "problem": ErrorAnswer},
    ),
    "receive": Endpoint("POST", "/v1/groups/{group}/receive", "Lease messages for a group.", LeaseRequest, LeaseAnswer),
    "ack": Endpoint(
        "POST",
        "/v1/groups/{group}/ack",
        "Acknowledge received messages.",
        AckRequest,
        AckAnswer,
        statuses={200: "All are acknowledged.", 207: "Some are not; see each `code`."},
    ),
    "change": Endpoint(
        "POST",
        "/v1/groups/{group}/change",
        "Change the time until a received message is delivered again.",
        ChangeRequest,
        ChangeAnswer,
    ),
    "send_task": Endpoint(
        "POST",
        "/v1/tasks",
        "Send a task to a Ray Serve deployment.",
        NewTask,
        TaskAnswer,
        statuses={202: "Stored. The header Location has the address of the task's state."},
    ),
    "task": Endpoint(
        "GET", "/v1/tasks/{task}", "Return the state of a task.", answer=TaskAnswer, query=(_QUEUE, _RESULTS)
    ),
    "openapi": Endpoint("GET", "/v1/openapi.json", "Return this document.", answer=dict[str, Any], has_user=False),
}
"""The endpoints by name. `create_http_app` has the function of each."""
WEBHOOKS: Final[dict[str, Webhook]] = {
    TASK_ENDED: Webhook(
        "The gateway calls the `webhook` of a task at the task's end, at least once. Answer with a status 2xx.",
        WebhookEvent,
        {
            "webhook-id": "Names this end of the task. A repeated call has the same id.",
            "webhook-timestamp": "Time of the call in s since 1970.",
            "webhook-signature": "If the gateway has a key: `v1,` and the base64 of the HMAC-SHA256 over "
            "`ID.TIMESTAMP.BODY`.",
        },
    )
}
"""The requests that the gateway sends, by event."""

PAGE_REFUSED: Final = (
    "the gateway answers no web pages, because access control is off: send the request from a program, or turn on "
    "access control (docs/access.md)"
)

Serve = Callable[[Request], Awaitable[Response]]


def create_http_app(
    handlers: Handlers,
    cluster: GatewayCluster,
    access: GatewayAccess,
    tails: Tails,
    histories: Histories,
    webhooks: TaskWebhooks | None = None,
) -> Starlette:
    """Build the HTTP face. `handlers`: the service's table of calls. `tails`: the live tails, which the caller closes.
    `histories`: reads the states of tasks. `webhooks`: the web hooks of tasks; None if they are off."""
    bodies = RequestBodies(lambda: cluster.max_body_bytes)
    calls, tasks = MessageCalls(handlers, bodies), TaskCalls(cluster, access, bodies, histories, webhooks)
    described = document(list(ENDPOINTS.values()), WEBHOOKS)

    async def openapi(request: Request) -> Response:
        return json_answer(described)

    functions: dict[str, Serve] = {
        "send": calls.send,
        "tail": TailCalls(cluster, access, tails).tail,
        "receive": calls.receive,
        "ack": calls.ack,
        "change": calls.change,
        "send_task": tasks.send,
        "task": tasks.state,
        "openapi": openapi,
    }
    routes = [
        Route(one.path, _answering(functions[name], access), methods=[one.method]) for name, one in ENDPOINTS.items()
    ]
    routes.append(Route("/healthz", _healthz))
    return Starlette(routes=routes, exception_handlers={HTTPException: _no_endpoint})


def _answering(serve: Serve, access: GatewayAccess) -> Serve:
    """Return an endpoint that answers errors with problems, and refuses web pages if access is off."""

    async def answer(request: Request) -> Response:
        try:
            if not access.is_on and is_from_page(request.headers, request.scope.get("server")):
                raise CallRefusedError(Code.FORBIDDEN, PAGE_REFUSED)
            return await serve(request)
        except ClientDisconnect:
            return Response(status_code=CLIENT_LEFT)
        # every error of a request is answered with a problem; the log has the unexpected ones
        except Exception as error:
            return problem_of(error)

    return answer


def is_from_page(headers: Mapping[str, str], server: tuple[str, int | None] | None) -> bool:
    """Return whether a browser sent a request for a web page. `server`: the address at which the request arrived.

    Browsers name the page in `Origin` or `Sec-Fetch-Site`, except for reads of a page's own host. A page can make its
    own host name an alias of this machine. So a request that arrives at a loopback address must name that address, or
    "localhost", as its host.
    """
    if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
        return True
    if server is None or not is_loopback(server[0]):
        return False
    try:
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
    except ValueError:
        return True  # no URL has such a host
    return not is_loopback(host)


async def _healthz(request: Request) -> Response:
    """Answer "ok" while the process serves, for load balancers."""
    return PlainTextResponse("ok\n")


async def _no_endpoint(request: Request, error: Exception) -> Response:
    """Answer a request for a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    status, title = error.status_code, HTTPStatus(error.status_code).name
    detail = f"{request.method} {request.url.path:.200} does not exist; see {ENDPOINTS['openapi'].path}"
    answer = json_answer(
        ErrorAnswer(title=title, status=status, code=100 * status, detail=detail), status, kind=PROBLEM
    )
    answer.headers.update(error.headers or {})
    return answer


def http_front_of(
    client: Client,
    handlers: Handlers,
    cluster: GatewayCluster,
    access: GatewayAccess,
    webhooks: TaskWebhooks | None,
    *,
    shares_port: bool,
) -> HttpFront:
    """Return the HTTP server of a gateway process, ready to start in the running event loop. `client`: a client without
    a namespace. `handlers`: the service's table of calls. `webhooks`: the web hooks of tasks; None if they are off.
    `shares_port`: True if several processes listen at one port."""

    async def read_tail(topic: str, positions: Positions | None, most: int) -> Arrived:
        # not in the threads of the cluster's calls: a tail of a broker that is away must not delay them
        return await asyncio.to_thread(partial(client.admin.tail, topic, positions, max_messages=most))

    tails = Tails(read_tail, rate=HTTP_TAIL_RATE, max_viewers=HTTP_TAILS_MAX, limit="one gateway process")
    app = create_http_app(handlers, cluster, access, tails, histories_of(client), webhooks)
    return HttpFront(app, tails, shares_port=shares_port)
