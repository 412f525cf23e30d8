"""The audit log of the console: a system topic with a JSON record for each change. The records are kept as long as
other messages.

Each broker group has one queue of the topic. An audit entry is stored in the first broker group that accepts it.
Readers merge the queues of all broker groups.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from raymq.client.admin.browse import Span, read_cursor, read_page
from raymq.client.client import Client
from raymq.client.consumer.pull_once import CheckedFetch, read_checked, stored_times
from raymq.client.consumer.repair_wait import read_repaired, wait_at_stores
from raymq.common.errors import RaymqError, ServiceNotAvailableError
from raymq.common.message import MessageExt, MessageQueue, SystemMessage
from raymq.common.names import SYSTEM_PREFIX
from raymq.common.protocol.route import MASTER_ID
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.encode import ProducerSequence, encode_batch
from raymq.remoting.storage_client import StorageClient
from raymq.tools.console.cluster import AuditEntry, AuditPage

AUDIT_TOPIC: Final = f"{SYSTEM_PREFIX}audit"
AUDIT_CALL_TIMEOUT_S: Final = 4.0
_READ_BYTES: Final = 1 << 20


class AuditLog:
    """Writes and reads the entries of the console's audit log. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._repairs = wait_at_stores(self._storage)

    def write(self, entry: AuditEntry) -> None:
        """Store an audit entry as durably as any message. Raises ServiceNotAvailableError if no broker group accepts
        the entry."""
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
        raise ServiceNotAvailableError(
            f"no broker group accepts the entry of the audit log: {'; '.join(reasons) or 'no broker group is running'}"
        )

    def read(self, limit: int, cursor: str | None) -> AuditPage:
        """Return at most `limit` audit entries, newest first, and the cursor of the next page. Waits a few seconds for
        the repair of damaged entries. The outcome of an entry that stays damaged is the reason why it cannot be
        read."""
        page = read_page(
            self._spans() if cursor is None else read_cursor(AUDIT_TOPIC, cursor)[0],
            self._fetch,
            lambda message: True,
            newest_first=True,
            limit=limit,
            max_scanned=max(limit, 1),
            in_time=lambda: True,
        )
        return AuditPage(tuple(map(_entry, page.messages, stored_times(page.messages))), page.cursor)

    def _spans(self) -> list[Span]:
        spans = []
        for name in sorted(self._client.admin.brokers()):
            bounds = self._storage(name).queue_bounds(AUDIT_TOPIC, 0, AUDIT_CALL_TIMEOUT_S)
            spans.append(Span(MessageQueue(AUDIT_TOPIC, name, 0), bounds.min_offset, bounds.max_offset))
        return spans

    def _fetch(self, wanted: Sequence[tuple[MessageQueue, int, int]]) -> list[CheckedFetch]:
        return [self._fetch_one(*one) for one in wanted]

    def _fetch_one(self, queue: MessageQueue, offset: int, count: int) -> CheckedFetch:
        request = FetchRequest(AUDIT_TOPIC, 0, offset, count)

        def read() -> CheckedFetch:
            [result] = self._storage(queue.broker_name).fetch([request], _READ_BYTES, 0.0, AUDIT_CALL_TIMEOUT_S)
            return read_checked(result, queue, offset)

        return read_repaired(read, lambda fetched: {queue: fetched.damaged}, self._repairs)

    def _storage(self, broker_name: str) -> StorageClient:
        data = self._client.admin.brokers().get(broker_name)
        if data is None:
            raise ServiceNotAvailableError(f"broker group {broker_name!r} is not registered")
        return self._client.storages.get(data.storages[MASTER_ID])


def _entry(message: MessageExt, stored_ms: int) -> AuditEntry:
    if (error := message.body_error) is not None:
        return AuditEntry(stored_ms, "", "", "", "", outcome=str(error))
    return AuditEntry(**json.loads(message.body))
