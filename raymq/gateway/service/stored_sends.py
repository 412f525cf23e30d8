"""StoredSends answers the sends that a client repeats at this process after another process has died.

A client whose gateway is killed does not learn which of its sends were stored. It connects to another process, and
repeats the sends with the same ids. So for SEND_WINDOW_S after a client's connection is first used here, the stores are
asked for each id before its message is sent. They are also asked if a send with the id has failed in this process, or
was stored less durably than was requested. A message that is stored gets its answer from the stored message.

A store answers after all messages that it had before are safe. Four kinds of repeats are stored twice all the same.
Consumers recognise such a message by its id:

- The first send is still on its way from a process that lives, to which the client lost its connection.
- The broker group with the message does not answer, and another broker group of the topic does.
- The connection is older than SEND_WINDOW_S: a proxy passes on calls of one client to several processes.
- The store keeps no index (`message_index_enable: false`).
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from raymq.common.errors import InvalidArgumentError, RaymqError
from raymq.common.message import MessageExt
from raymq.common.protocol.recall import RecallHandle
from raymq.gateway.clients.send_window import SEND_WINDOW_S
from raymq.gateway.convert.incoming import CLIENT_PROPERTIES, IncomingMessage
from raymq.gateway.convert.statuses import ok
from raymq.gateway.service.cluster import GatewayCluster
from raymq.gateway.wire import messages as wire

CONNECTION_AGES_MAX: Final = 20_000
"""Maximum number of connections whose age is kept. The connection that was used least recently then counts as new."""
STORED_TIMEOUT_S: Final = 2.5
"""Time in seconds within which a broker group must tell which messages it has stored. It is shorter than the timeout of
a send, 3 s in official clients, so that a client learns the reason of a failure."""
SILENT_S: Final = 5.0
"""Time in seconds for which a broker group that did not answer is not asked again, if another group answered."""
IDS_MAX: Final = 256
"""Maximum number of ids in one question to a broker group."""

_Question = tuple[list[str], asyncio.Future[list[MessageExt]]]
"""Ids, and the messages with these ids."""


class StoredSends:
    """Finds the messages of repeated sends in the stores. Used in one event loop."""

    def __init__(self, cluster: GatewayCluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._clock = cluster, clock
        self._first_used_s: OrderedDict[tuple[str, str], float] = OrderedDict()
        """The time of the first send of each client and connection, the least recently used first."""
        self._waiting: dict[tuple[str, bool], list[_Question]] = {}
        """The questions that wait while another question about the same topic is under way."""
        self._silent_until_s: dict[str, float] = {}
        """The broker groups that did not answer lately."""
        self._asking: set[asyncio.Future[list[MessageExt]]] = set()

    def may_be_repeated(self, client_id: str, peer: str) -> bool:
        """Return True if a send over the connection from the address `peer` may repeat a send at another process."""
        key, now_s = (client_id, peer), self._clock()
        first_s = self._first_used_s.setdefault(key, now_s)
        self._first_used_s.move_to_end(key)
        if len(self._first_used_s) > CONNECTION_AGES_MAX:
            self._first_used_s.popitem(last=False)
        return now_s < first_s + SEND_WINDOW_S

    async def find(self, messages: Sequence[IncomingMessage]) -> list[wire.SendResultEntry | None]:
        """Return the answer for each message of one topic that is stored already, and None for the others.

        Raises ServiceNotAvailableError or RequestTimeoutError if no broker group can tell. Then nothing was sent.
        """
        delayed = any(one.message.deliver_at_ms is not None for one in messages)
        topic = messages[0].message.topic
        stored = await self._ask(topic, [one.message_id for one in messages], delayed=delayed)
        by_id: dict[str, list[MessageExt]] = {}
        for one in stored:
            by_id.setdefault(one.message_id, []).append(one)
        return [_answer(one, by_id.get(one.message_id, ())) for one in messages]

    async def _ask(self, topic: str, ids: list[str], *, delayed: bool) -> list[MessageExt]:
        """Ask for ids. Questions that come while one is under way go together with the next one."""
        key, question = (topic, delayed), asyncio.get_running_loop().create_future()
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.append((ids, question))
            result: list[MessageExt] = await question
            return result
        self._waiting[key] = []
        try:
            return await self._asked(topic, ids, delayed=delayed)
        finally:
            self._begin_next(key)

    def _begin_next(self, key: tuple[str, bool]) -> None:
        waiting = self._waiting[key]
        if not waiting:
            del self._waiting[key]
            return
        taken: list[_Question] = []
        count = 0
        while waiting and (not taken or count + len(waiting[0][0]) <= IDS_MAX):
            taken.append(waiting.pop(0))
            count += len(taken[-1][0])
        ids = [one for some, _ in taken for one in some]
        asking = asyncio.ensure_future(self._asked(key[0], ids, delayed=key[1]))
        self._asking.add(asking)
        asking.add_done_callback(lambda done: self._answered(key, taken, done))

    def _answered(
        self,
        key: tuple[str, bool],
        taken: list[_Question],
        done: asyncio.Future[list[MessageExt]],
    ) -> None:
        self._asking.discard(done)
        for _, question in taken:
            if question.done():
                continue  # the caller has left
            if done.cancelled():
                question.cancel()
            elif (error := done.exception()) is not None:
                question.set_exception(error)
            else:
                question.set_result(done.result())
        self._begin_next(key)

    async def _asked(self, topic: str, ids: list[str], *, delayed: bool) -> list[MessageExt]:
        """Ask all broker groups of a topic. A group that does not answer counts as empty if another group answers. A
        group whose store keeps no index counts as empty."""
        names, now_s = list((await self._cluster.route(topic, create=True)).brokers), self._clock()
        self._silent_until_s = {name: until_s for name, until_s in self._silent_until_s.items() if now_s < until_s}
        brokers = [name for name in names if name not in self._silent_until_s] or names
        ask = self._cluster.queues.stored
        answers = await asyncio.gather(
            *(
                self._cluster.call(partial(ask, topic, name, ids, STORED_TIMEOUT_S, delayed=delayed))
                for name in brokers
            ),
            return_exceptions=True,
        )
        found: list[list[MessageExt]] = []
        errors: list[BaseException] = []
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, InvalidArgumentError):
                errors.append(answer)
            else:
                found.append([] if isinstance(answer, BaseException) else answer)
        for error in errors:
            if not found or not isinstance(error, RaymqError):
                raise error
        for name, answer in zip(brokers, answers, strict=True):
            if answer in errors:
                self._silent_until_s[name] = self._clock() + SILENT_S
        return [message for answer in found for message in answer]


def _answer(sent: IncomingMessage, stored: Sequence[MessageExt]) -> wire.SendResultEntry | None:
    for one in stored:
        if not _is_same(sent, one):
            continue
        handle, due_ms = "", sent.message.deliver_at_ms
        if due_ms is not None:
            handle = str(RecallHandle(sent.message.topic, one.broker_name, due_ms, sent.message_id))
        return wire.SendResultEntry(
            status=ok(), message_id=sent.message_id, offset=one.queue_offset, recall_handle=handle
        )
    return None


def _is_same(sent: IncomingMessage, stored: MessageExt) -> bool:
    """Return False for another message with the same id, and for a damaged message."""
    message = sent.message
    own = {item for item in message.properties.items() if item[0] not in CLIENT_PROPERTIES}
    return (
        stored.body_error is None
        and stored.body == message.body
        and stored.tags == message.tags
        and tuple(stored.keys) == tuple(message.keys)
        and own <= {**stored.properties, **stored.system_properties}.items()
    )
