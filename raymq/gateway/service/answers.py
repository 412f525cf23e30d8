"""Makes handlers of bytes from functions of messages: parses each request, checks its client, and answers errors.

An error is an answer with a status. So the client can decide by the code whether it sends the request again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Protocol, Self, TypeVar

from raymq.common.errors import RequestTimeoutError
from raymq.gateway.calls import CallContext, UnaryCall
from raymq.gateway.clients.access import GatewayAccess
from raymq.gateway.convert.statuses import CallRefusedError, status_of
from raymq.gateway.wire.enums import Code
from raymq.gateway.wire.messages import Status
from raymq.gateway.wire.parsing import parse_request

CLIENT_ID: Final = "x-mq-client-id"
NAMESPACE_HEADER: Final = "x-mq-namespace"
CLIENT_ID_CHARS_MAX: Final = 255
ANSWER_MARGIN_S: Final = 0.1
"""Time in seconds before the caller's deadline at which a call ends, so that its answer arrives in time."""

T = TypeVar("T")


class _AnyMessage(Protocol):
    @classmethod
    def FromString(cls, data: bytes) -> Self: ...  # noqa: N802  # protobuf's name

    def SerializeToString(self) -> bytes: ...  # noqa: N802  # protobuf's name

    def DiscardUnknownFields(self) -> None: ...  # noqa: N802  # protobuf's name


Request = TypeVar("Request", bound=_AnyMessage)
Response = TypeVar("Response", bound=_AnyMessage)


def client_id_of(call: CallContext) -> str:
    """Return the id of the client that makes a call. If access is on, the id contains the user, so that no user can
    speak for another user's client. Raises CallRefusedError if the call has no id, or a long one."""
    client_id = call.metadata.get(CLIENT_ID, "")
    if not client_id.strip() or len(client_id) > CLIENT_ID_CHARS_MAX:
        raise CallRefusedError(
            Code.CLIENT_ID_REQUIRED, f"the header {CLIENT_ID} must have 1 to {CLIENT_ID_CHARS_MAX} characters"
        )
    return f"{call.user}/{client_id}" if call.user else client_id


def namespace_header(call: CallContext) -> str:
    """Return the namespace that the metadata of a call names; empty if they name none."""
    return call.metadata.get(NAMESPACE_HEADER, "")


def answer_left_s(call: CallContext) -> float:
    """Return the time in seconds in which a call must have an answer; 0 or less if the caller waits no longer."""
    return call.left_s() - ANSWER_MARGIN_S


async def in_time(call: CallContext, what: str, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is cancelled ANSWER_MARGIN_S before the caller's deadline. Raises
    RequestTimeoutError then: a client learns more from its status than from a call that ends without an answer.

    `what`: the work's name in the error.
    """
    return await within(answer_left_s(call), what, work)


async def within(timeout_s: float | None, what: str, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is cancelled after `timeout_s`; None means no limit. Raises
    RequestTimeoutError then. A TimeoutError of `work` itself is raised unchanged.

    `what`: the work's name in the error.
    """
    ends = asyncio.timeout(timeout_s)
    try:
        async with ends:
            return await work
    except TimeoutError:
        if not ends.expired():
            raise
        raise RequestTimeoutError(what, max(0.0, timeout_s or 0.0)) from None


def answered(
    access: GatewayAccess,
    kind: type[Request],
    answer: Callable[[CallContext, Request], Awaitable[Response]],
    failed: Callable[[Status, Request | None], Response],
    at_once: Callable[[CallContext, Request], Response | None] | None = None,
) -> UnaryCall:
    """Return the handler of a method. `answer`: returns the answer to a request, or raises; it gets the call with the
    user that signed it, and checks the user's rights. `failed`: makes the answer to a request that failed; it gets None
    instead of a request that is not parsed. `at_once`: as `answer`, for answers that need no wait; None if the answer
    needs one."""

    async def handle(call: CallContext, data: bytes) -> bytes:
        request: Request | None = None
        try:
            client_id_of(call)
            signed = access.authenticated(call)
            request = parse_request(kind, data)
            response = await answer(signed, request)
        # every error of a call is answered with a status; the log has the unexpected ones
        except Exception as error:
            response = failed(status_of(error), request)
        return response.SerializeToString()

    if at_once is None:
        return UnaryCall(handle)

    def answer_at_once(call: CallContext, data: bytes) -> bytes | None:
        request: Request | None = None
        response: Response | None
        try:
            client_id_of(call)
            signed = access.authenticated(call)
            request = parse_request(kind, data)
            response = at_once(signed, request)
        # every error of a call is answered with a status; the log has the unexpected ones
        except Exception as error:
            response = failed(status_of(error), request)
        return None if response is None else response.SerializeToString()

    return UnaryCall(handle, answer_at_once)
