"""Announces the consumers of a gateway as members of their groups, and passes administrators' questions on to them.

    administrator ──▶ broker ◀── long poll of the gateway ──▶ ClientMember ──▶ the client's Telemetry stream

Python's client answers neither question, so each question has a timeout. Node's client answers a question about stacks
with a constant text, and refuses to consume a message. Administrators' questions arrive in threads of raymq's client;
the streams belong to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from raymq.common.errors import InvalidArgumentError, RaymqError, RequestTimeoutError, ServiceNotAvailableError
from raymq.common.members.questions import DirectConsumption, RunningInfo, ThreadStack
from raymq.common.protocol.clients import ConsumerData
from raymq.gateway.clients.access import GatewayAccess, consumes
from raymq.gateway.clients.command_streams import CommandStream, CommandStreams
from raymq.gateway.convert.outgoing import outgoing
from raymq.gateway.service.cluster import Announcer
from raymq.gateway.service.measured_calls import language_name
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import ClientType, Code
from raymq.records.format.decode import decode_record
from raymq.records.format.layout import RecordError

MEMBERS_MAX: Final = 1000
"""Maximum number of consumers that one gateway process announces to brokers. A heartbeat contains all of them."""
MEMBER_ANSWER_S: Final = 5.0
"""Time in seconds for which a question waits for a client's answer."""
VERSION_CHARS_MAX: Final = 64
"""Maximum length of the version of a client's library. A longer version is cut."""
LOOP_MARGIN_S: Final = 5.0
"""Time in seconds for which a thread waits for a busy event loop, in addition to MEMBER_ANSWER_S."""
_WITH_LISTENER: Final = (ClientType.PUSH_CONSUMER, ClientType.LITE_PUSH_CONSUMER)
_STATUSES: Final = {
    Code.OK: "CONSUME_SUCCESS",
    Code.FAILED_TO_CONSUME_MESSAGE: "RECONSUME_LATER",
    Code.MESSAGE_CORRUPTED: "EXCEPTION",
}

logger = logging.getLogger(__name__)


class ClientMember:
    """One consumer, as a member of its group that answers administrators (`raymq.common.members.questions.Answers`).

    `resources`: the names that the client uses, by stored topic. `stream`: returns the client's open stream.
    """

    def __init__(
        self,
        data: ConsumerData,
        resources: dict[str, wire.Resource],
        stream: Callable[[], CommandStream | None],
        access: GatewayAccess,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.data, self.resources = data, resources
        self._stream, self._access, self._loop = stream, access, loop

    def running_info(self, client_id: str, host: str, *, stacks: bool) -> RunningInfo:
        """Return what the gateway knows of the client. With `stacks`, ask the client for the stacks of its threads."""
        found: tuple[ThreadStack, ...] = ()
        trouble = ""
        if stacks:
            try:
                found = self._stacks()
            except RaymqError as error:
                trouble = f"the client has not sent its stacks: {error}"
        data = self.data
        return RunningInfo(
            *(client_id, host, os.getpid(), data.member, data.group, data.consume_type, data.message_model.value),
            data.subscriptions,
            trouble=trouble,
            stacks=found,
        )

    def consume_directly(self, client_id: str, record: bytes, broker_name: str) -> DirectConsumption:
        """Let the client's listener process one message, and commit nothing.

        Raises RequestTimeoutError if the client does not answer, ServiceNotAvailableError if it has no stream, and
        InvalidArgumentError if the message cannot be read, or if the client refuses it because of its order mode.
        """
        try:
            message = decode_record(record, broker_name=broker_name)
        except RecordError as error:
            raise InvalidArgumentError(f"the message cannot be read: {error}") from None
        resource = self.resources.get(message.topic) or wire.Resource(name=message.topic)
        nonce, sent = secrets.token_hex(8), outgoing(message, resource)
        command = wire.TelemetryCommand(verify_message_command=wire.VerifyMessageCommand(nonce=nonce, message=sent))
        begun_s = time.monotonic()
        status = self._ask(nonce, command, topic=message.topic).status
        took_ms = (time.monotonic() - begun_s) * 1000
        if status.code not in _STATUSES:
            raise InvalidArgumentError(f"the client refused the message: {status.message or f'code {status.code}'}")
        reason = "" if status.code == Code.OK else status.message
        return DirectConsumption(client_id, self.data.member, _STATUSES[Code(status.code)], reason, took_ms)

    def _stacks(self) -> tuple[ThreadStack, ...]:
        nonce = secrets.token_hex(8)
        question = wire.PrintThreadStackTraceCommand(nonce=nonce)
        answer = self._ask(nonce, wire.TelemetryCommand(print_thread_stack_trace_command=question))
        return (ThreadStack(self.data.member, tuple(answer.thread_stack_trace.thread_stack_trace.splitlines())),)

    def _ask(self, nonce: str, command: wire.TelemetryCommand, topic: str = "") -> wire.TelemetryCommand:
        """Ask the client, and wait for the answer. Called in a thread without an event loop."""
        running = asyncio.run_coroutine_threadsafe(self._asked(nonce, command, topic), self._loop)
        try:
            return running.result(MEMBER_ANSWER_S + LOOP_MARGIN_S)
        except TimeoutError:
            running.cancel()
            timeout_s = MEMBER_ANSWER_S + LOOP_MARGIN_S
            raise RequestTimeoutError(f"a question to client {self.data.member!r}", timeout_s) from None

    def _asked(
        self, nonce: str, command: wire.TelemetryCommand, topic: str
    ) -> Coroutine[Any, Any, wire.TelemetryCommand]:
        async def asked() -> wire.TelemetryCommand:
            stream = self._stream()
            if stream is None:
                raise ServiceNotAvailableError(f"client {self.data.member!r} has no open stream at this gateway")
            # rights may have changed since the stream was opened
            self._access.require(stream.call, *consumes(self.data.group, *([topic] if topic else [])))
            return await stream.ask(nonce, command, MEMBER_ANSWER_S)

        return asked()


class ClientMembers:
    """The consumers of one gateway process that are announced as members. Used in the event loop."""

    def __init__(self, announcer: Announcer, access: GatewayAccess, streams: CommandStreams) -> None:
        self._announcer, self._access, self._streams = announcer, access, streams
        self._members: dict[str, ClientMember] = {}

    def announce(
        self, client_id: str, group: str, subscriptions: dict[str, tuple[wire.Resource, str]], settings: wire.Settings
    ) -> None:
        """Announce a consumer, or its new subscriptions: the client's name and the expression of each stored topic.
        `settings`: the client's kind, language and version. Only a push consumer has a listener, which administrators
        can call. Beyond MEMBERS_MAX consumers, a new one is not announced; it consumes like the others."""
        expressions = {topic: text for topic, (_, text) in subscriptions.items()}
        library = settings.user_agent
        data = ConsumerData(
            *(group, "PUSH" if settings.client_type in _WITH_LISTENER else "POP", expressions),
            member=client_id,
            language=language_name(library.language),
            version=library.version[:VERSION_CHARS_MAX],
            consume_mode="share",
        )
        known = self._members.get(client_id)
        if known is not None and known.data == data:
            return
        if known is None and len(self._members) >= MEMBERS_MAX:
            logger.info("client %s is not announced: %d clients are announced, the maximum", client_id, MEMBERS_MAX)
            return
        resources = {topic: resource for topic, (resource, _) in subscriptions.items()}
        if known is None:
            known = self._members[client_id] = ClientMember(
                data,
                resources,
                lambda: self._streams.of_client(client_id),
                self._access,
                asyncio.get_running_loop(),
            )
        known.data, known.resources = data, resources
        self._announcer.set_consumer(known, data)

    def gone(self, client_id: str) -> None:
        """Announce that a consumer has gone. Does nothing for another client."""
        member = self._members.pop(client_id, None)
        if member is not None:
            self._announcer.remove(member)
