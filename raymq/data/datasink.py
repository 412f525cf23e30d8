"""TopicDatasink: rows of a dataset as messages of a topic, each stored exactly once.

    driver   fixes the topic's queues and the time from which delivery times count, before the first task is submitted
    task     connects once per worker process; sends its rows under the producer id GROUP/WRITE/TASK, with the row's
             number as the sequence number (raymq.client.producer.repeatable), so that a retried task adds nothing

`write_topic` sends the rows of a Ray Data dataset as messages of a topic.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ray.data import Dataset
from ray.data._internal.execution.interfaces import TaskContext
from ray.data._internal.planner.plan_write_op import WRITE_UUID_KWARG_NAME
from ray.data.block import Block, BlockAccessor
from ray.data.datasource.datasink import Datasink, WriteResult

from raymq.client.producer.table import QueueRange
from raymq.common import identity
from raymq.common.errors import InvalidArgumentError
from raymq.common.identity import Identity
from raymq.common.message import MessageQueue
from raymq.common.names import check_group, check_user_topic
from raymq.common.numbers import POSITIVE, bounded, checked
from raymq.data.messages import MessageFields, Serializer, to_messages
from raymq.data.shared_client import driver_client, worker_client

GROUP_MAX_BYTES: Final = 20
"""Maximum length of a producer group's name in bytes. With the ids of the write and the task, the producer id then has
at most 64 bytes."""


@dataclass(frozen=True, slots=True)
class WriteSummary:
    """The result of a completed write: all `rows` are stored.

    `stored_before`: the number of rows that earlier attempts of retried tasks had already stored. `ranges`: the offset
    ranges of all other rows, sorted by queue and offset.
    """

    rows: int
    stored_before: int
    ranges: tuple[QueueRange, ...]


class TopicDatasink(Datasink):
    """Datasink for `Dataset.write_datasink` that sends rows as messages of a topic. It has the same arguments and
    errors as `raymq.data.write_topic`. `summary` is the result of the last write; None until a write is complete."""

    def __init__(
        self,
        topic: str,
        *,
        address: str | None = None,
        body_field: str | None = None,
        value_serializer: Serializer = "json",
        key_field: str | None = None,
        key_serializer: Serializer = "string",
        tags_field: str | None = None,
        keys_field: str | None = None,
        properties_field: str | None = None,
        sharding_key_field: str | None = None,
        deliver_at_field: str | None = None,
        producer_group: str = "ray-data",
        idempotent: bool = True,
        namespace: str | None = None,
    ) -> None:
        self._namespace = namespace
        self._topic, self._address, self._idempotent = check_user_topic(topic), address, idempotent
        self._group = check_group(producer_group)
        if len(producer_group.encode()) > GROUP_MAX_BYTES:
            raise InvalidArgumentError(
                f"producer_group={producer_group!r} must have at most {GROUP_MAX_BYTES} bytes, because the "
                "producer ids of the write's tasks begin with it"
            )
        self._fields = MessageFields(
            body=body_field,
            key=key_field,
            tags=tags_field,
            keys=keys_field,
            properties=properties_field,
            sharding_key=sharding_key_field,
            deliver_at=deliver_at_field,
            value_serializer=value_serializer,
            key_serializer=key_serializer,
        )
        self.summary: WriteSummary | None = None
        self._queues: tuple[MessageQueue, ...] = ()
        self._first_queue = self._now_ms = 0
        self._user: Identity | None = None
        """The user in whose name the program is authenticated. The write tasks act in the name of the same
        user."""
        self._fix()

    def on_write_start(self, schema: Any = None) -> None:
        """Choose, once for all attempts of the tasks, the values that must be equal in all attempts. If the rows'
        columns are known, check that they include the fields that the options name. Ray Data calls this method in the
        driver, before the first task. Raises the same errors as `write_topic`."""
        if schema is not None and schema.names:
            self.check_fields(schema.names)
        self.summary = None
        self._fix()

    def check_fields(self, names: Sequence[str]) -> None:
        """Raise InvalidArgumentError unless `names`, the columns of the rows, include each field from which a part of
        the message is made."""
        self._fields.check(names)

    def _fix(self) -> None:
        with driver_client(self._address, self._namespace) as client:
            self._namespace = client.names.name
            self._queues = client.write_queues(self._topic)
            self._user = identity.present()
        # Begin each write with a random queue of the topic, so that many small writes together use all queues equally.
        self._first_queue = secrets.randbelow(len(self._queues))
        self._now_ms = time.time_ns() // 1_000_000

    def write(self, blocks: Iterable[Block], ctx: TaskContext) -> WriteSummary:
        """Send the rows of one task, and wait until the rows are stored. If Ray retries a task, the new attempt
        continues after the rows that are already stored. Raises the errors of `Client.repeatable_writer` and of the
        writer that it returns."""
        write_id = ctx.kwargs[WRITE_UUID_KWARG_NAME] if self._idempotent else uuid.uuid4().hex
        with (
            worker_client().use(self._user, self._namespace or "") as client,
            client.repeatable_writer(
                self._topic,
                producer_id=f"{self._group}/{write_id}/{ctx.task_idx}",
                queues=self._queues,
                first_queue=(self._first_queue + ctx.task_idx) % len(self._queues),
                now_ms=self._now_ms,
            ) as writer,
        ):
            for block in blocks:
                rows = BlockAccessor.for_block(block).to_arrow()
                if rows.num_rows:
                    writer.write(to_messages(rows, self._fields))
            result = writer.finish()
        return WriteSummary(result.count, result.stored_before, result.ranges)

    def on_write_complete(self, write_result: WriteResult) -> None:
        """Add up the summaries that the write tasks returned, and store the sum in `summary`. Ray Data calls this
        method in the driver after all write tasks have ended."""
        self.summary = _added(write_result.write_returns)

    def get_name(self) -> str:
        """Return the name that Ray's progress bars show for a write to a topic."""
        return "Topic"


def _added(parts: Sequence[WriteSummary]) -> WriteSummary:
    ranges = sorted((one for part in parts for one in part.ranges), key=lambda one: (one.queue, one.first_offset))
    joined: list[QueueRange] = []
    for one in ranges:
        last = joined[-1] if joined else None
        if last and last.queue == one.queue and last.first_offset + last.count == one.first_offset:
            joined[-1] = QueueRange(one.queue, last.first_offset, last.count + one.count)
        else:
            joined.append(one)
    return WriteSummary(sum(part.rows for part in parts), sum(part.stored_before for part in parts), tuple(joined))


@checked
@bounded(concurrency=POSITIVE)
def write_topic(
    dataset: Dataset,
    topic: str,
    *,
    address: str | None = None,
    body_field: str | None = None,
    value_serializer: Serializer = "json",
    key_field: str | None = None,
    key_serializer: Serializer = "string",
    tags_field: str | None = None,
    keys_field: str | None = None,
    properties_field: str | None = None,
    sharding_key_field: str | None = None,
    deliver_at_field: str | None = None,
    producer_group: str = "ray-data",
    idempotent: bool = True,
    namespace: str | None = None,
    concurrency: int | None = None,
    ray_remote_args: dict[str, Any] | None = None,
) -> WriteSummary:
    """Execute a dataset and send each row as a message. Returns when all messages are stored.

    Options are as in `Dataset.write_kafka`. The body is the whole row as JSON, or the field `body_field`: bytes and
    text unchanged, other types by `value_serializer`. The field `key_field`, converted by `key_serializer`, is the
    message's first key and its sharding key. So messages with the same key go to one queue in the order of the rows.
    `sharding_key_field` names another field for the sharding key. `tags_field` is text; `keys_field` is text or a list
    of text; `properties_field` is a map or a struct of text. `deliver_at_field` is a timestamp, or a number of ms since
    1970; null for a message without a delay. `namespace` is the namespace of `raymq.connect`. JSON contains bytes in
    base64, and times in ISO 8601.

    Each row is stored exactly once, even if Ray retries its task. The store identifies a row by `producer_group`, the
    write, the task and the row's number in the task. So a retried task must produce the same rows in the same order. A
    random shuffle, a sample or an impure function does not guarantee this: a retried task would then fail or store
    wrong rows. In these cases pass ``idempotent=False``; a retried task then stores its rows a second time, as with
    Kafka. A second call of this function is a separate write.

    Raises the errors of `raymq.connect`. Raises TopicNotExistError if the topic does not exist, NoPermissionError if
    the user may not write to it, and InvalidArgumentError if the rows do not have a field or if options contradict each
    other. An execution fails with MessageIllegalError if a row cannot be a message, and with ServiceNotAvailableError
    or SendUnknownError if a broker is unavailable for 30 s. Rows that were written before the failure stay in the
    topic.
    """
    sink = TopicDatasink(
        topic,
        address=address,
        body_field=body_field,
        value_serializer=value_serializer,
        key_field=key_field,
        key_serializer=key_serializer,
        tags_field=tags_field,
        keys_field=keys_field,
        properties_field=properties_field,
        sharding_key_field=sharding_key_field,
        deliver_at_field=deliver_at_field,
        producer_group=producer_group,
        idempotent=idempotent,
        namespace=namespace,
    )
    known = dataset.schema(fetch_if_missing=False)
    if known is not None:
        sink.check_fields(known.names)
    dataset.write_datasink(sink, concurrency=concurrency, ray_remote_args=ray_remote_args)
    assert sink.summary is not None
    return sink.summary
