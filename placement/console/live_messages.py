"""LiveMessages: the console's questions and orders about messages, on a live cluster.

The audit of the console: a system topic with one JSON record per change, kept as long as other messages.

Each broker group has a queue of it. An entry goes to the first broker group that takes it, and is read from all.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Final

from raymq.client.admin.browse import Span, read_cursor, read_page
from raymq.client.admin.dead_letters import DeadLetter, LetterPlace
from raymq.client.admin.track import MessageTrack
from raymq.client.client import Client
from raymq.common.errors import (
    InvalidArgumentError,
    OffsetOutOfRangeError,
    RaymqError,
    ServiceNotAvailableError,
    TopicNotExistError,
)
from raymq.common.message import Message, MessageExt, MessageQueue, SystemMessage
from raymq.common.names import SYSTEM_PREFIX
from raymq.common.protocol.route import MASTER_ID
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.records.format.encode import ProducerSequence, encode_batch
from raymq.remoting.storage_client import StorageClient
from raymq.tools.console.backend.cluster import AuditEntry, AuditPage, Listing
from raymq.tools.console.backend.messages import (
    BrowseQuery,
    DeadLetterPage,
    DeadLetterView,
    DelayedView,
    LetterReplayed,
    MessagePage,
    NewMessage,
    ProducerClient,
    SentMessage,
    TailBatch,
)


class LiveMessages:
    """One part of the LiveBackend. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._producer = client.producer("console", send_timeout_s=8.0)
        self._audit_log = AuditLog(client)

    def browse(self, query: BrowseQuery) -> MessagePage:
        """Messages of a topic, bounded."""
        page = self._client.admin.browse(
            query.topic,
            queue=query.queue,
            begin_ms=query.begin_ms,
            end_ms=query.end_ms,
            begin_offset=query.begin_offset,
            newest_first=query.newest_first,
            tags=query.tags,
            contains=query.contains,
            limit=query.limit,
            max_scanned=query.max_scanned,
            max_ms=query.max_ms,
            cursor=query.cursor,
            whole_bodies=False,
        )
        return MessagePage(page.messages, page.cursor, page.scanned, page.truncated)

    def query_by_key(self, topic: str, key: str, *, max_messages: int = 32) -> Sequence[MessageExt]:
        """The newest messages with a key, oldest first."""
        return self._client.admin.query_by_key(topic, key, max_messages=max_messages)

    def query_by_id(self, topic: str, message_id: str) -> Sequence[MessageExt]:
        """The messages that an id names."""
        return self._client.admin.query_by_id(topic, message_id)

    def message_at(self, queue: MessageQueue, queue_offset: int) -> MessageExt | None:
        """The message at an offset, None if there is none."""
        try:
            found = self._client.admin.pull(queue, queue_offset, max_messages=1).messages
        except OffsetOutOfRangeError:
            return None
        return found[0] if found and found[0].queue_offset == queue_offset else None

    def message_track(self, message: MessageExt) -> Sequence[MessageTrack]:
        """Per group of the message's topic, how far it is with the message."""
        return self._client.admin.message_track(message)

    def send(self, message: NewMessage) -> SentMessage:
        """Send a message."""
        deliver_at_ms = time.time_ns() // 1_000_000 + message.delay_ms if message.delay_ms else None
        result = self._producer.send(
            Message(
                message.topic,
                message.body,
                message.tags,
                message.keys,
                dict(message.properties),
                deliver_at_ms=deliver_at_ms,
            )
        )
        return SentMessage(
            result.message_id, result.offset_message_id, result.queue, result.queue_offset, result.status.value
        )

    def deliver_to_group(self, topic: str, message_id: str, group: str) -> int:
        """Have one group get a message again, and no other group."""
        name = f"console-{time.time_ns()}"
        return self._client.admin.replay(topic, ids=[message_id], to_group=group, name=name).sent

    def recall(self, topic: str, handle: str) -> str:
        """As Producer.recall."""
        return self._producer.recall(topic, handle)

    def tail(self, topic: str, positions: Mapping[MessageQueue, int] | None, *, max_messages: int = 100) -> TailBatch:
        """Messages behind `positions`, without waiting for more, in one call for each broker group."""
        arrived = self._client.admin.tail(topic, positions, max_messages=max_messages)
        return TailBatch(arrived.messages, arrived.positions, arrived.skipped)

    def dead_letters(
        self, group: str, *, replayed: bool = False, limit: int = 50, cursor: str | None = None
    ) -> DeadLetterPage:
        """Dead letters of a group, oldest first."""
        letters: list[DeadLetter] = []
        try:
            for letter in self._client.admin.dead_letters(group).behind(_place(cursor), replayed=replayed):
                letters.append(letter)
                if len(letters) > limit:
                    break
        except TopicNotExistError:
            return DeadLetterPage(())  # the group never had any
        cut = letters[:limit]
        more = json.dumps(cut[-1].place) if len(letters) > limit else None
        return DeadLetterPage(tuple(DeadLetterView(one.message, one.topic, one.replayed) for one in cut), more)

    def replay_dead_letters(
        self, group: str, letters: Sequence[LetterPlace] | None, *, rate: float | None = None
    ) -> Iterator[LetterReplayed]:
        """Bring chosen dead letters back, or all with None; gives the result of each as it comes."""
        for result in self._client.admin.dead_letters(group).replay(rate=rate, letters=letters):
            letter = result.letter
            yield LetterReplayed(letter.place, letter.message.message_id, result.error)

    def delayed(self, begin_ms: int, end_ms: int, *, limit: int = 100) -> DelayedView:
        """Messages that wait for a time."""
        found = self._client.admin.delayed(begin_ms, end_ms, limit=limit)
        return DelayedView(found.levels, found.next_due, found.hours, found.late_ms, found.truncated)

    def producers(self) -> Listing[ProducerClient]:
        """The clients that produce."""
        return Listing(
            tuple(
                ProducerClient(one.client_id, one.host, one.pid, one.group, one.silent_s)
                for one in self._client.admin.producer_connections()
            )
        )

    def record_audit(self, entry: AuditEntry) -> None:
        """Keep an entry for good."""
        self._audit_log.write(entry)

    def audit(self, *, limit: int = 100, cursor: str | None = None) -> AuditPage:
        """Entries, newest first."""
        return self._audit_log.read(limit, cursor)


def _place(cursor: str | None) -> LetterPlace | None:
    if cursor is None:
        return None
    try:
        name, queue_id, offset = json.loads(cursor)
        return LetterPlace(str(name), int(queue_id), int(offset))
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(f"this is no cursor of dead letters: {error}") from None


AUDIT_TOPIC: Final = f"{SYSTEM_PREFIX}audit"
AUDIT_CALL_TIMEOUT_S: Final = 4.0
_READ_BYTES: Final = 1 << 20


class AuditLog:
    """Writes and reads the audit. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def write(self, entry: AuditEntry) -> None:
        """Store an entry. On return it is as durable as any message. ServiceNotAvailableError if no broker group takes
        it."""
        message = SystemMessage(AUDIT_TOPIC, json.dumps(asdict(entry)).encode(), tags=entry.role)
        batch = encode_batch(
            [message],
            0,
            born_host=("127.0.0.1", 0),
            born_timestamp_ms=time.time_ns() // 1_000_000,
            message_ids=[secrets.token_hex(16).upper()],
            producer=ProducerSequence(f"console-{secrets.token_hex(8)}", 0, 0),
        )
        reasons = []
        for name in sorted(self._client.admin.brokers()):
            try:
                self._storage(name).append([batch], AUDIT_CALL_TIMEOUT_S)
                return
            except RaymqError as error:
                reasons.append(f"{name}: {error}")
        raise ServiceNotAvailableError(f"no broker group takes the audit's entry: {'; '.join(reasons) or 'none runs'}")

    def read(self, limit: int, cursor: str | None) -> AuditPage:
        """Entries, newest first."""
        page = read_page(
            self._spans() if cursor is None else read_cursor(AUDIT_TOPIC, cursor)[0],
            self._fetch,
            lambda message: True,
            newest_first=True,
            limit=limit,
            max_scanned=max(limit, 1),
            in_time=lambda: True,
        )
        return AuditPage(tuple(_entry(message) for message in page.messages), page.cursor)

    def _spans(self) -> list[Span]:
        spans = []
        for name in sorted(self._client.admin.brokers()):
            bounds = self._storage(name).queue_bounds(AUDIT_TOPIC, 0, AUDIT_CALL_TIMEOUT_S)
            spans.append(Span(MessageQueue(AUDIT_TOPIC, name, 0), bounds.min_offset, bounds.max_offset))
        return spans

    def _fetch(self, wanted: Sequence[tuple[MessageQueue, int, int]]) -> list[FetchResult]:
        results = []
        for queue, offset, count in wanted:
            request = FetchRequest(AUDIT_TOPIC, 0, offset, count)
            results += self._storage(queue.broker_name).fetch([request], _READ_BYTES, 0.0, AUDIT_CALL_TIMEOUT_S)
        return results

    def _storage(self, broker_name: str) -> StorageClient:
        data = self._client.admin.brokers().get(broker_name)
        if data is None:
            raise ServiceNotAvailableError(f"no broker group {broker_name!r} is registered")
        return self._client.storages.get(data.storages[MASTER_ID])


def _entry(message: MessageExt) -> AuditEntry:
    return AuditEntry(**json.loads(message.body))
