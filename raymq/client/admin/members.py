"""Administration: queries to the live members of a group. The brokers forward the queries
(raymq.common.members)."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

import msgspec

from raymq.client.admin.base import ADMIN_TIMEOUT_S
from raymq.client.admin.groups import GroupAdmin
from raymq.common.errors import (
    BodyUnreadableError,
    ClientStateError,
    InvalidArgumentError,
    RaymqError,
    RequestTimeoutError,
    ServiceNotAvailableError,
)
from raymq.common.members.questions import DirectConsumption, MemberAnswer, Question, RunningInfo, decode_answer
from raymq.common.message import MessageExt
from raymq.common.names import check_group
from raymq.common.parallel import map_parallel
from raymq.common.protocol.clients import ConsumerConnection
from raymq.common.retry import Backoff
from raymq.records.format.decode import decode_record
from raymq.records.format.inner_batch import split_inner_batch
from raymq.records.format.inner_batch_encode import is_inner_batch
from raymq.records.format.layout import RecordError
from raymq.remoting.broker_client import broker_client
from raymq.remoting.storage_clients import call_master

RUNNING_TIMEOUT_S: Final = 10.0
"""Default timeout in seconds for a member's answer to `running_info`."""
CONSUME_TIMEOUT_S: Final = 28.0
"""Default timeout in seconds for a listener that `consume_directly` calls with one message."""
LISTENS_WITHIN_S: Final = 3.0
"""Time in seconds within which a client begins to poll a broker for queries, after the client has started or its
previous broker has stopped."""
CLIENTS_AT_ONCE: Final = 4
ASK_GRACE_S: Final = 5.0
"""Extra time in seconds, beyond the client's timeout, in which a broker must forward a query and return the
answer."""


class MemberAdmin(GroupAdmin):
    """Administration with queries to live members of groups. No query commits an offset or changes anything at the
    brokers."""

    def running_info(
        self, group: str, member: str | None = None, *, stacks: bool = False, timeout_s: float = RUNNING_TIMEOUT_S
    ) -> list[RunningInfo]:
        """Return information that the live members of a group report, sorted by client and name: their queues, the
        sizes of their process queues, offsets, rates, and with `stacks` the stacks of their processes' threads.

        `member` is the name of a member, or the id of a client (`consumer_connections` has both). Without `member`, all
        members are queried. For a member that does not answer within `timeout_s`, the result has the reason as its
        `trouble`. If a named member does not answer, raises RequestTimeoutError or ServiceNotAvailableError. Raises
        InvalidArgumentError if no live member has this name.
        """
        found = self._connections_of(group, member)
        clients = {one.client_id: one for one in found}

        def ask(connection: ConsumerConnection) -> list[RunningInfo]:
            name = "" if member in (None, connection.client_id) else member or ""
            try:
                return list(self._ask(connection, Question("running", group, name, stacks), timeout_s).running)
            except RaymqError as error:
                if member is not None:
                    raise
                return [_silent(one, str(error)) for one in found if one.client_id == connection.client_id]

        answers = map_parallel(ask, clients.values(), threads_max=CLIENTS_AT_ONCE, name="running-info")
        infos = [info for answer in answers for info in answer]
        return sorted(infos, key=lambda info: (info.client_id, info.member))

    def consume_directly(
        self, group: str, message: MessageExt, member: str | None = None, *, timeout_s: float = CONSUME_TIMEOUT_S
    ) -> DirectConsumption:
        """Call the listener of a live push consumer of a group with one message, and return the result. The call
        commits no offset, sends no message back and changes no statistics. If the listener returns a reply, the reply
        is sent.

        `member` chooses the consumer, as in `running_info`; without it, the first consumer by name is called. The
        message need not be in a topic to which the group subscribes. Repeat this call with care: each call runs the
        user's code. Raises InvalidArgumentError if no live push consumer has this name. Raises RequestTimeoutError if
        the listener does not return within `timeout_s`; the listener may still be running in that case.
        """
        found = [one for one in self._connections_of(group, member) if one.consumer.consume_type == "PUSH"]
        if not found:
            raise InvalidArgumentError(
                f"group {group!r} has no connected push "
                f"consumer{('' if member is None else f' called {member!r}')}, and only a push consumer has a "
                "listener; see `raymq group connections`"
            )
        chosen = min(found, key=lambda one: (one.consumer.member, one.client_id))
        question = Question(
            "consume", group, chosen.consumer.member, record=self._record_of(message), broker_name=message.broker_name
        )
        outcome = self._ask(chosen, question, timeout_s).consumed
        if outcome is None:
            raise ServiceNotAvailableError(
                f"member {chosen.consumer.member} did not report whether it consumed the message; see `raymq "
                f"group connections {group}`"
            )
        return outcome

    def _connections_of(self, group: str, member: str | None) -> list[ConsumerConnection]:
        """Return the connections of a group's live members. `member`, if given, is a member's name or a client's id,
        and selects the connections of this member or client."""
        known = self.consumer_connections(check_group(group))
        found = [one for one in known if member is None or member in (one.client_id, one.consumer.member)]
        if member is not None and not found:
            raise InvalidArgumentError(
                f"group {group!r} has no connected member {member!r}; see `raymq group connections {group}`"
            )
        return found

    def _record_of(self, message: MessageExt) -> bytes:
        """Return the record of a message, read from its store's log. Raises InvalidArgumentError if the record at the
        message's physical offset does not contain the message."""
        record = call_master(
            self._routes,
            self._storages,
            message.queue,
            ADMIN_TIMEOUT_S,
            lambda storage, left_s: storage.record_at(message.physical_offset, left_s),
        )
        if not is_inner_batch(record):
            return record
        try:
            parts = split_inner_batch(record)
        except RecordError as error:
            place = message.queue_offset, message.physical_offset
            raise BodyUnreadableError(str(message.queue), *place, error.reason, True) from None
        for one in parts:
            if decode_record(one, broker_name=message.broker_name).queue_offset == message.queue_offset:
                return bytes(one)
        raise InvalidArgumentError(
            f"the batch at physical offset {message.physical_offset} does not contain message {message.message_id!r}"
        )

    def _ask(self, connection: ConsumerConnection, question: Question, timeout_s: float) -> MemberAnswer:
        """Send a query to a client, through the broker that the client polls. The query is not repeated after it has
        reached the client."""
        backoff, give_up_s = Backoff(), time.monotonic() + LISTENS_WITHIN_S
        while True:
            failure: RaymqError | None = None
            for broker_name in self._broker_names():
                ask = partial(broker_client(broker_name).call, "ask_client", connection.client_id, question, timeout_s)
                try:
                    answer: bytes | None = ask(timeout_s=timeout_s + ASK_GRACE_S)
                except RequestTimeoutError:
                    raise
                except ServiceNotAvailableError as error:  # try the next broker: the client may poll that broker
                    failure = error
                    continue
                if answer is not None:
                    return _read(connection, answer)
            if time.monotonic() >= give_up_s:
                raise failure or ServiceNotAvailableError(
                    f"client {connection.client_id} does not accept queries: it has stopped, or runs another "
                    "version of raymq"
                )
            time.sleep(backoff.next())


def _read(connection: ConsumerConnection, encoded: bytes) -> MemberAnswer:
    try:
        answer = decode_answer(encoded)
    except msgspec.DecodeError as error:
        raise ServiceNotAvailableError(
            f"the answer of client {connection.client_id} cannot be decoded: {error}"
        ) from None
    if answer.error:
        raise ClientStateError(f"client {connection.client_id} answered with an error: {answer.error}")
    return answer


def _silent(connection: ConsumerConnection, trouble: str) -> RunningInfo:
    """Return a description of a member that has not answered, made from its heartbeats."""
    data = connection.consumer
    return RunningInfo(
        *(connection.client_id, connection.host, connection.pid, data.member, data.group, data.consume_type),
        *(data.message_model.value, data.subscriptions),
        trouble=trouble,
    )
