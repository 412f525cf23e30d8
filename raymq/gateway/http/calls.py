"""The endpoints of the HTTP face that have a call in RocketMQ's protocol: send, receive, acknowledge, change.

    request ──▶ bearer token, namespace, JSON ──▶ handler of the protocol's method ──▶ JSON or problem

A token, ``Authorization: Bearer USER:SECRET``, has a user of raymq and the user's gateway secret (`raymq user
gateway-secret`). The gateway derives this secret from the user's key. So no token is issued, stored or revoked: a
change of the user's own secret, or a disabled user, ends the token. curl and web hooks cannot sign the time of each
call, as RocketMQ's clients do, so this module signs the present time for them. One authorizer (`GatewayAccess`) then
decides about both faces. A token is a secret that travels with each request, so other machines need TLS.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from raymq.gateway.calls import AnswerStream, CallContext, Handlers, UnaryCall
from raymq.gateway.http.answers import ack_answer, change_answer, json_answer, leased_message, problem, send_answer
from raymq.gateway.http.bodies import RequestBodies, until_gone
from raymq.gateway.http.requests import (
    ack_request,
    change_request,
    new_messages,
    only,
    parsed,
    raw_message,
    receive_request,
    send_request,
)
from raymq.gateway.http.shapes import AckRequest, ChangeRequest, LeaseAnswer, LeasedMessage, LeaseRequest
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code
from raymq.gateway.wire.table import SERVICE
from raymq.records.format.message_id import UniqueIdGenerator

HTTP_CLIENT_ID: Final = "http"
"""The client id of all calls over HTTP. A repeated send may come over another connection, so the connection has no
id."""
HTTP_CALL_S: Final = 30.0
"""Time in seconds that a call over HTTP may take, in addition to the time for which it waits for messages."""
RECEIVED_BYTES_MAX: Final = 16 << 20
"""Maximum size in bytes of the messages of one answer. One message may be larger."""
CLIENT_LEFT: Final = 499
"""Status of an answer that nobody reads, because the client has left."""
NAMESPACE: Final = "x-mq-namespace"
_TOKEN: Final = re.compile(r"[Bb]earer +([A-Za-z0-9_.@-]{1,64}):([!-~]{1,256})")


def signature_headers(authorization: str, now_s: float) -> dict[str, str]:
    """Return the headers that sign a call made at `now_s`, in s since 1970, with the token in `authorization`.

    Returns no header if the text is no token: the authorizer refuses the call if access is on.
    """
    token = _TOKEN.fullmatch(authorization.strip())
    if token is None:
        return {}
    date = datetime.fromtimestamp(now_s, UTC).strftime("%Y%m%dT%H%M%SZ")
    signature = hmac.new(token[2].encode(), date.encode(), hashlib.sha1).hexdigest()
    return {
        "x-mq-date-time": date,
        "authorization": f"MQv2-HMAC-SHA1 Credential={token[1]}, SignedHeaders=x-mq-date-time, Signature={signature}",
    }


def call_of(request: Request, wait_s: float = 0.0) -> CallContext:
    """Return the circumstances of a request. `wait_s`: the time in seconds for which it waits for messages."""
    metadata = {"x-mq-client-id": HTTP_CLIENT_ID, NAMESPACE: request.headers.get(NAMESPACE, "")}
    metadata |= signature_headers(request.headers.get("authorization", ""), time.time())
    peer = ""
    if request.client is not None:
        host, port = request.client
        peer = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
    return CallContext(metadata, peer, time.monotonic() + HTTP_CALL_S + wait_s)


def is_raw(request: Request) -> bool:
    """Return whether the whole body of a send is one message: it is no JSON, or the query string says ``raw=true``."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return request.query_params.get("raw", "") == "true" or kind != "application/json"


class MessageCalls:
    """The endpoints for messages. `handlers`: the handlers of the protocol's methods. `bodies`: reads the bodies of
    requests. `address`: an IP address of this process, for the ids of messages."""

    def __init__(self, handlers: Handlers, bodies: RequestBodies, address: str = "127.0.0.1") -> None:
        self._handlers, self._bodies, self._ids = handlers, bodies, UniqueIdGenerator(address)

    async def send(self, request: Request) -> Response:
        """Store one or several messages."""
        # base64 and escapes make JSON longer than the message
        async with self._bodies.read(request, messages=2) as body:
            if is_raw(request):
                messages = [raw_message(body, request.query_params.multi_items())]
            else:
                only(request.query_params, "raw")
                messages = new_messages(body)
            new_ids = [self._ids.next() for one in messages if one.message_id is None]
            now_ms, topic = time.time_ns() // 1_000_000, request.path_params["topic"]
            sent = send_request(topic, messages, now_ms, iter(new_ids))
            call = replace(call_of(request), new_ids=frozenset(new_ids))
            return send_answer(await self._call("SendMessage", call, sent, wire.SendMessageResponse))

    async def ack(self, request: Request) -> Response:
        """Acknowledge received messages."""
        asked = ack_request(request.path_params["group"], await self._asked(request, AckRequest))
        return ack_answer(await self._call("AckMessage", call_of(request), asked, wire.AckMessageResponse))

    async def change(self, request: Request) -> Response:
        """Change the invisible time of a received message."""
        asked = change_request(request.path_params["group"], await self._asked(request, ChangeRequest))
        method = "ChangeInvisibleDuration"
        return change_answer(await self._call(method, call_of(request), asked, wire.ChangeInvisibleDurationResponse))

    async def receive(self, request: Request) -> Response:
        """Lease messages. If the client leaves before it can be answered, the messages are visible to others at
        once."""
        asked: LeaseRequest = await self._asked(request, LeaseRequest)
        data = receive_request(request.path_params["group"], asked).SerializeToString()
        handler = self._handlers[f"/{SERVICE}/ReceiveMessage"]
        assert isinstance(handler, AnswerStream)
        async with aclosing(handler.handle(call_of(request, asked.wait_s), data)) as answers:
            first = await _first_unless_gone(request, answers)
            if first is None:
                return Response(status_code=CLIENT_LEFT)
            status = wire.ReceiveMessageResponse.FromString(first).status
            if status.code not in (Code.OK, Code.MESSAGE_NOT_FOUND):
                return problem(status)
            messages: list[LeasedMessage] = []
            size = 0
            async for answer in answers:
                one = wire.ReceiveMessageResponse.FromString(answer)
                if one.WhichOneof("content") == "message":
                    size += len(answer)
                    if messages and size > RECEIVED_BYTES_MAX:
                        break  # the service returns this message and the others to the group
                    messages.append(leased_message(one.message))
        return json_answer(LeaseAnswer(messages=messages))

    async def _asked(self, request: Request, kind: Any) -> Any:
        only(request.query_params)
        async with self._bodies.read(request) as body:
            return parsed(body, kind)

    async def _call(self, method: str, call: CallContext, request: Any, kind: Any) -> Any:
        """Return the answer of a method of the protocol."""
        handler = self._handlers[f"/{SERVICE}/{method}"]
        assert isinstance(handler, UnaryCall)
        return kind.FromString(await handler.handle(call, request.SerializeToString()))


async def _first_unless_gone(request: Request, answers: AsyncGenerator[bytes, None]) -> bytes | None:
    """Return the first answer of a stream; None if the client leaves before."""
    first = asyncio.ensure_future(anext(answers))
    gone = asyncio.ensure_future(until_gone(request))
    try:
        await asyncio.wait((first, gone), return_when=asyncio.FIRST_COMPLETED)
        return None if gone.done() else await first
    finally:
        gone.cancel()
        first.cancel()
        await asyncio.gather(first, gone, return_exceptions=True)
