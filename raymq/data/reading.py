"""`read_topic`: reads topics as a dataset of Ray Data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import ray
from ray.data import DataContext, Dataset

from raymq.client.consumer.subscription import ALL
from raymq.common.errors import InvalidArgumentError
from raymq.common.numbers import NOT_NEGATIVE, NUMBER_MAX, POSITIVE, NumberRange, bounded, checked
from raymq.data.datasource import TASK_TIMEOUT_MS, RangesDatasource, TopicDatasource
from raymq.data.offsets import EARLIEST, LATEST, Offsets
from raymq.records.filters.sql import SqlFilter
from raymq.records.kernels.columns import Unreadable

TASK_MIN_BYTES: Final = 16 * 1024 * 1024
"""Minimum size, in bytes, of the data of one read task. The start-up time of a task is too long for less data."""
READ_TASKS_MAX: Final = 1_000_000
_AMOUNT: Final = NumberRange(0.0, NUMBER_MAX)
"""Allowed range for the amount of a Ray resource, such as CPUs, that a read task requests."""


@checked
@bounded(
    rows_per_block=POSITIVE,
    timeout_ms=TASK_TIMEOUT_MS,
    num_cpus=_AMOUNT,
    num_gpus=_AMOUNT,
    memory=_AMOUNT,
    resources=_AMOUNT,
    override_num_blocks=NumberRange(1, READ_TASKS_MAX),
    max_calls=NOT_NEGATIVE,
)
def read_topic(
    topics: str | Sequence[str],
    *,
    address: str | None = None,
    trigger: Literal["once"] = "once",
    start_offset: Offsets = EARLIEST,
    end_offset: Offsets = LATEST,
    tags: str = ALL,
    expression: SqlFilter | None = None,
    columns: Sequence[str] | None = None,
    fail_on_data_loss: bool = True,
    unreadable: Unreadable = "null",
    rows_per_block: int | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    memory: float | None = None,
    override_num_blocks: int | None = None,
    timeout_ms: int | None = None,
    namespace: str | None = None,
    label_selector: dict[str, str] | None = None,
    fallback_strategy: list[dict[str, Any]] | None = None,
    max_calls: int | None = None,
    resources: dict[str, float] | None = None,
    accelerator_type: str | None = None,
    runtime_env: dict[str, Any] | None = None,
) -> Dataset:
    """Read the messages of topics between two offsets of each queue, as a dataset with the columns `raymq.data.SCHEMA`.

    This call fixes the offsets. So each execution, and each retried task, reads the same rows, and later messages are
    not in the dataset. `start_offset` and `end_offset` (exclusive) are as in `ray.data.read_kafka`: ``"earliest"`` or
    ``"latest"``; an offset, if the topics have one broker group; a datetime, for the first message stored at that time
    or later (UTC if it has no time zone); or offsets by topic and queue, ``{"orders": {"broker-a:3": 1500}}``. A queue
    that is missing in the last form starts earliest and ends latest. An end beyond a queue's end means the queue's end.

    `tags` filters like a subscription, ``"paid || refunded"``; `expression` filters by properties, ``raymq.sql("price >
    5")``. Both exclude a message before its body is read. Only `columns` are read; a plan that selects columns reads
    only the selected columns. An unreadable message has a null `value`; the column `error`, which must be requested by
    name, contains the reason. With `unreadable` "raise", an execution fails with BodyUnreadableError instead.
    `rows_per_block` limits the rows of a read task, and therefore of a block. `timeout_ms` limits the time of each read
    task. `address` is the address of the Ray cluster, if this process is not yet connected to Ray; `namespace` is the
    namespace of `raymq.connect`. The other arguments configure the read tasks, as in `ray.data.read_datasource`.

    Raises the errors of `raymq.connect`. Raises IllegalNameError for an illegal topic name, TopicNotExistError if a
    topic does not exist, InvalidArgumentError for contradictory options, DataLossError if requested offsets were
    deleted, and OffsetOutOfRangeError for a start beyond the end of a queue. Without `fail_on_data_loss`, the last two
    errors are not raised: a warning is logged, and the offsets are skipped. An execution fails with DataLossError if
    messages of the dataset were deleted after this call, and with RequestTimeoutError after `timeout_ms`.
    """
    if trigger != "once":
        raise InvalidArgumentError(
            f"trigger={trigger!r} is not supported: a dataset is read once. For later messages use "
            "raymq.data.iter_topic"
        )
    source = TopicDatasource(
        topics,
        address=address,
        start_offset=start_offset,
        end_offset=end_offset,
        tags=tags,
        expression=expression,
        columns=columns,
        fail_on_data_loss=fail_on_data_loss,
        rows_per_block=rows_per_block,
        timeout_ms=timeout_ms,
        namespace=namespace,
        unreadable=unreadable,
    )
    return ray.data.read_datasource(
        source,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        memory=memory,
        override_num_blocks=override_num_blocks or number_of_tasks(source),
        label_selector=label_selector,
        fallback_strategy=fallback_strategy,
        max_calls=max_calls,
        resources=resources,
        accelerator_type=accelerator_type,
        runtime_env=runtime_env,
    )


def number_of_tasks(source: RangesDatasource) -> int:
    """Return the number of read tasks: one per block. For a small read there may be more tasks, up to two per CPU with
    at least TASK_MIN_BYTES each. Ray's own number of tasks, at least 200, is meant for files of unknown size. With that
    number, a small read would spend most of its time on starting tasks."""
    size_bytes = source.estimate_inmemory_data_size()
    block_bytes = DataContext.get_current().target_max_block_size or size_bytes
    cpus = int(ray.cluster_resources().get("CPU", 1))
    return max(1, -(-size_bytes // max(1, block_bytes)), min(2 * cpus, size_bytes // TASK_MIN_BYTES))
