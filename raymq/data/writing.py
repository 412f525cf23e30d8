"""`write_topic`: a dataset of Ray Data as messages of a topic."""

from __future__ import annotations

from typing import Any

from ray.data import Dataset

from raymq.common.numbers import POSITIVE, bounded, checked
from raymq.data.datasink import TopicDatasink, WriteSummary
from raymq.data.messages import Serializer


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
    """Execute a dataset and send each row as a message; return when all are stored.

    Options as in `Dataset.write_kafka`. The body is the whole row as JSON; or `body_field`: bytes and text as they are,
    other types by `value_serializer`. `key_field` is the message's first key, by `key_serializer`, and its sharding
    key, so messages of one key go to one queue in the order of the rows; `sharding_key_field` is another one for that.
    `tags_field` is text; `keys_field` text, or a list of it; `properties_field` a map or a struct of text;
    `deliver_at_field` a timestamp, or ms since 1970, null for a message that does not wait. `namespace` is that of
    `raymq.connect`. JSON has bytes in base64,
    times in ISO 8601.

    A row is stored once, though Ray retries its task: the store knows it by `producer_group`, the write, the task and
    its number there. For that a retried task must make the same rows in the same order. Where it may not, as behind a
    random shuffle, a sample or a function that is not pure, it fails or stores wrong rows: pass ``idempotent=False``,
    and a retried task stores its rows once more, as with Kafka. A second call of this function is another write.

    Raises as `raymq.connect`; TopicNotExistError, NoPermissionError; InvalidArgumentError for fields that the rows do
    not have or options that make no sense. An execution fails with MessageIllegalError for a row that cannot be a
    message, and with ServiceNotAvailableError or SendUnknownError when a broker is away for 30 s; rows that were
    written before stay.
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
