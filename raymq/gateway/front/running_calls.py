"""RunningCall carries one gRPC call: from the request's data to the task of its handler, and back to the answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, Final, Protocol

from raymq.gateway.calls import AnswerStream, BothStreams, CallContext, StreamRefusedError, UnaryCall
from raymq.gateway.front.connection import Http2Connection
from raymq.gateway.front.frames import Http2Code
from raymq.gateway.front.messages import (
    ANSWER_HEAD,
    MESSAGE_PREFIX_BYTES,
    OK_TRAILERS,
    CallEndedError,
    GrpcMessage,
    GrpcStatus,
    MessageBuffer,
    inflated,
    only_trailers,
    prefixed,
    trailers,
)

INFLATE_HERE_BYTES: Final = 16 * 1024
"""Size in bytes up to which a compressed message is inflated in the event loop."""
_DEFLATE_RATIO_MAX: Final = 1032
"""No deflated byte makes more bytes."""

logger = logging.getLogger(__name__)


class PendingBytes:
    """The bytes of requests that a process holds, on all connections together. `bytes_max`: the maximum."""

    def __init__(self, bytes_max: int) -> None:
        self._max = bytes_max
        self.held = 0

    def take(self, size: int) -> None:
        """Count bytes. Raises CallEndedError, and counts nothing, if they are too many."""
        if self.held + size > self._max:
            raise CallEndedError(GrpcStatus.RESOURCE_EXHAUSTED, "the gateway holds too many bytes of requests")
        self.held += size

    def give(self, size: int) -> None:
        """Count bytes no longer."""
        self.held -= size


class CallHost(Protocol):
    """A connection, as its calls see it. `calls`: its open calls, by stream. `tasks`: the tasks of its calls."""

    http2: Http2Connection
    calls: dict[int, RunningCall]
    tasks: set[asyncio.Task[None]]

    def flush_soon(self) -> None:
        """Write the new output in this turn of the event loop."""


class RunningCall:
    """One open call. It leaves `CallHost.calls` when its answer is given, or when its stream ends.

    `ends_s`: the time, by `time.monotonic`, at which the host ends the call; None if the caller waits without limit.
    """

    __slots__ = (
        *("ends_s", "_host", "_stream_id", "_handler", "_context", "_encoding", "_bytes_max", "_pending", "_buffer"),
        *("_held", "_unread", "_all_arrived", "_arrived", "_drained", "_task", "_has_head"),
    )

    def __init__(
        self,
        host: CallHost,
        stream_id: int,
        handler: UnaryCall | AnswerStream | BothStreams,
        context: CallContext,
        *,
        ends_s: float | None,
        encoding: str,
        bytes_max: int,
        pending: PendingBytes,
    ) -> None:
        """`encoding`: the value of the header ``grpc-encoding``. `bytes_max`: the maximum size of a message. `pending`:
        counts the bytes of all calls."""
        self.ends_s = ends_s
        self._host, self._stream_id, self._handler, self._context = host, stream_id, handler, context
        self._encoding, self._bytes_max, self._pending = encoding, bytes_max, pending
        self._buffer = MessageBuffer(bytes_max)
        self._held = 0
        """Number of bytes that this call has counted in `pending`."""
        self._unread = 0
        """Number of received bytes for which the client has no new credit."""
        self._all_arrived = False
        self._arrived: asyncio.Future[None] | None = None
        """Done when more of the request has arrived; None while nobody waits."""
        self._drained: asyncio.Future[None] | None = None
        """Done when the client has accepted the answer so far; None while nobody waits."""
        self._task: asyncio.Task[None] | None = None
        self._has_head = False
        host.calls[stream_id] = self
        if isinstance(handler, BothStreams):
            self._start(self._run_both(handler))

    # Called by the host.

    def receive(self, data: bytes, *, ended: bool) -> None:
        """Take a part of the request. `ended`: True with the last part."""
        size = len(data)
        try:
            if size:
                self._pending.take(size)
                self._held += size
                self._buffer.add(data)
            self._all_arrived = ended
            if isinstance(self._handler, BothStreams):
                self._unread += size
                self._credit()
                if self._arrived is not None and not self._arrived.done():
                    self._arrived.set_result(None)
                return
            if self._buffer.has_surplus:
                raise CallEndedError(GrpcStatus.INTERNAL, "the method needs exactly one message")
            self._host.http2.consumed(self._stream_id, size)
            if ended:
                self._start_single(self._handler)
        except CallEndedError as error:
            self.end(error.status, error.reason)

    def drained(self) -> None:
        """Let the handler go on: the client has accepted the answer so far."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def end(self, status: GrpcStatus, reason: str) -> None:
        """End the call with an error for the caller, and cancel its handler."""
        if self._host.http2.waits(self._stream_id):
            # the client does not accept the answer so far, so it would not see its end
            self._host.http2.reset(self._stream_id, Http2Code.CANCEL)
            self._host.flush_soon()
        else:
            self._send_end(status, reason)
        self.gone()

    def gone(self) -> None:
        """Cancel the handler: nobody waits for its answer. Idempotent."""
        self._leave()
        if self._task is not None:
            self._task.cancel()

    # The handler's task.

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = task = asyncio.create_task(work)
        self._host.tasks.add(task)
        task.add_done_callback(self._host.tasks.discard)

    def _start_single(self, handler: UnaryCall | AnswerStream) -> None:
        """Start the handler of a method with one request."""
        message = self._buffer.take()
        if message is None:
            raise CallEndedError(GrpcStatus.INTERNAL, "the method needs exactly one message")
        if isinstance(handler, UnaryCall):
            if not self._is_answered_at_once(handler, message):
                self._start(self._run_unary(handler, message))
        else:
            self._start(self._run_answers(handler, message))

    def _is_answered_at_once(self, handler: UnaryCall, message: GrpcMessage) -> bool:
        """Answer a call that needs no wait, without a task. Returns False if the call needs a wait."""
        if handler.at_once is None or message.is_compressed:
            return False
        try:
            answer = handler.at_once(self._context, message.data)
        except Exception as error:
            self._failed(error)
            return True
        if answer is None:
            return False
        self._answer(answer)
        return True

    def _answer(self, answer: bytes) -> None:
        """Give the only answer of the call."""
        self._host.http2.answer(self._stream_id, ANSWER_HEAD, prefixed(answer), OK_TRAILERS)
        self._leave()
        self._host.flush_soon()

    async def _run_unary(self, handler: UnaryCall, message: GrpcMessage) -> None:
        try:
            request = await self._inflated(message) if message.is_compressed else message.data
            answer = await handler.handle(self._context, request)
        except BaseException as error:
            self._failed(error)
        else:
            self._answer(answer)

    async def _run_answers(self, handler: AnswerStream, message: GrpcMessage) -> None:
        try:
            request = await self._inflated(message) if message.is_compressed else message.data
            async with aclosing(handler.handle(self._context, request)) as answers:
                async for answer in answers:
                    await self._write(answer)
        except BaseException as error:
            self._failed(error)
        else:
            self._succeeded()

    async def _run_both(self, handler: BothStreams) -> None:
        try:
            async with aclosing(handler.handle(self._context, _Requests(self))) as answers:
                async for answer in answers:
                    await self._write(answer)
        except BaseException as error:
            self._failed(error)
        else:
            self._succeeded()

    async def next_request(self) -> bytes | None:
        """Return the next message of a stream of requests; None after the last one. Raises CallEndedError if the
        message is malformed."""
        while True:
            message = self._buffer.take()
            if message is not None:
                # inflated bytes are counted only until the handler has them
                request = await self._inflated(message) if message.is_compressed else message.data
                self._hold(len(self._buffer))
                self._unread -= self._consume(min(self._unread, len(message.data) + MESSAGE_PREFIX_BYTES))
                self._credit()
                return request
            if self._all_arrived:
                if len(self._buffer):
                    raise CallEndedError(GrpcStatus.INTERNAL, "the last message is incomplete")
                return None
            self._arrived = asyncio.get_running_loop().create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None

    async def _inflated(self, message: GrpcMessage) -> bytes:
        """Return a compressed message as it was before. Its bytes count before they exist."""
        bound = min(self._bytes_max, len(message.data) * _DEFLATE_RATIO_MAX)
        before = self._held
        self._hold(before + bound)
        if len(message.data) <= INFLATE_HERE_BYTES:
            request = inflated(message.data, self._encoding, bound)
        else:
            request = await asyncio.to_thread(inflated, message.data, self._encoding, bound)
        self._hold(before + len(request))
        return request

    async def _write(self, answer: bytes) -> None:
        """Send one of several answers, and wait until the client has accepted it."""
        http2 = self._host.http2
        if not self._has_head:
            self._has_head = True
            http2.send_head(self._stream_id, ANSWER_HEAD)
        http2.send_data(self._stream_id, prefixed(answer))
        self._host.flush_soon()
        if http2.waits(self._stream_id):
            self._drained = asyncio.get_running_loop().create_future()
            try:
                await self._drained
            finally:
                self._drained = None

    def _succeeded(self) -> None:
        self._send_end(GrpcStatus.OK, "")
        self._leave()

    def _failed(self, error: BaseException) -> None:
        """End the call with the error of its handler. Raises the error again if it is no Exception."""
        if isinstance(error, CallEndedError):
            self._send_end(error.status, error.reason)
        elif isinstance(error, StreamRefusedError):
            self._send_end(GrpcStatus.INVALID_ARGUMENT, str(error))
        elif isinstance(error, Exception):
            logger.error("a call of %s ended with an unexpected error", self._context.peer, exc_info=error)
            self._send_end(GrpcStatus.INTERNAL, "unexpected error; the gateway's log has it")
        else:
            self._send_end(GrpcStatus.CANCELLED, "the call was cancelled")
        self._leave()
        if not isinstance(error, Exception):
            raise error

    def _send_end(self, status: GrpcStatus, reason: str) -> None:
        """Send the end of the answer, unless the stream has ended."""
        http2 = self._host.http2
        if http2.is_open(self._stream_id) and self._host.calls.get(self._stream_id) is self:
            if self._has_head:
                block = OK_TRAILERS if status == GrpcStatus.OK else trailers(status, reason)
            else:
                block = only_trailers(status, reason)
            http2.send_tail(self._stream_id, block)
            self._host.flush_soon()

    def _leave(self) -> None:
        """Leave the open calls, and count no bytes any more. Idempotent."""
        self._host.calls.pop(self._stream_id, None)
        self._pending.give(self._held)
        self._held = 0

    def _hold(self, size: int) -> None:
        """Count `size` bytes in `pending`, in place of the bytes counted before. A call that has left counts none."""
        if self._stream_id in self._host.calls:
            if size > self._held:
                self._pending.take(size - self._held)
            else:
                self._pending.give(self._held - size)
            self._held = size

    def _credit(self) -> None:
        """Give the client credit for all bytes, if no whole message waits: the next message may need it."""
        if not self._buffer.has_message:
            self._unread -= self._consume(self._unread)

    def _consume(self, size: int) -> int:
        if size:
            self._host.http2.consumed(self._stream_id, size)
            self._host.flush_soon()
        return size


class _Requests(AsyncIterator[bytes]):
    """The messages of a stream of requests, as the handler reads them."""

    def __init__(self, call: RunningCall) -> None:
        self._call = call

    async def __anext__(self) -> bytes:
        request = await self._call.next_request()
        if request is None:
            raise StopAsyncIteration
        return request
