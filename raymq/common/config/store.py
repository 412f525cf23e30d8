"""The settings of a store directory: the section `store` of raymq.yaml, and the path of the directory.

Names are RocketMQ's in snake_case, with the unit at the end. Defaults are RocketMQ's unless design.md says otherwise
(spec/storage.md §6).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from raymq.common.config.section import SettingsSection
from raymq.common.config.values import (
    BATCH_UNIT_BYTES,
    COMMIT_LOG_DIR,
    CONSUME_QUEUE_EXT_FILE_BYTES,
    CONSUME_QUEUE_UNIT_BYTES,
    MAX_FILTER_MESSAGE_SIZE_BYTES,
)
from raymq.common.delay import DELAY_LEVELS, parse_delay_levels
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES, MESSAGE_SIZE_LIMIT_BYTES
from raymq.common.numbers import NUMBER_MAX

_HOOK_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def absolute_path(path: Path) -> Path:
    """Return the absolute path, with `~` resolved. Raises ValueError if the user in the path does not exist."""
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:  # `~user` names a user that does not exist
        raise ValueError(str(error)) from None


class FlushDiskType(Enum):
    """The moment at which an append is acknowledged. SYNC_FLUSH: after the append's bytes are on disk. ASYNC_FLUSH:
    after the bytes are in the file's page cache."""

    SYNC_FLUSH = "SYNC_FLUSH"
    ASYNC_FLUSH = "ASYNC_FLUSH"


class StoreOptions(SettingsSection):
    """The section `store` of raymq.yaml: file sizes, flushes and limits of a store."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store_path_commit_log: tuple[Path, ...] = ()
    """Directories among which the commit log's files alternate, each preferably on a separate disk. Each store has its
    own subdirectory in these directories. Empty: the files are in `commitlog` in the store directory."""
    read_only_commit_log_store_paths: tuple[Path, ...] = ()
    """Directories whose commit-log files are read, but which get no new files. A directory may also be listed in
    `store_path_commit_log`."""
    mapped_file_size_commit_log_bytes: Annotated[int, Field(ge=64, le=1 << 34)] = 1 << 30
    """Size of a commit-log file. The size cannot change after the store directory was created."""
    mapped_file_size_consume_queue_bytes: Annotated[int, Field(ge=CONSUME_QUEUE_UNIT_BYTES, le=1 << 30)] = 6_000_000
    """Size of a consume-queue file, rounded up to whole units of 20 bytes. The size cannot change after the store
    directory was created."""
    enable_consume_queue_ext: bool = False
    """If `true`, the store writes the tag code and the store time of each message to an extension file of the consume
    queue."""
    mapped_file_size_consume_queue_ext_bytes: Annotated[int, Field(ge=64, le=1 << 30)] = CONSUME_QUEUE_EXT_FILE_BYTES
    """Size of a consume-queue extension file. The size cannot change after the store directory was created."""
    warm_mapped_file_enable: bool = False
    """`true`, with `ASYNC_FLUSH`: a thread prefaults the next pages of the log ahead of a fast writer."""
    mapper_file_size_batch_consume_queue_bytes: Annotated[int, Field(ge=BATCH_UNIT_BYTES, le=1 << 30)] = (
        300_000 * BATCH_UNIT_BYTES
    )
    """Size of a batch-consume-queue file (topics of queue type `batch`), rounded up to whole units of 46 bytes."""
    flush_disk_type: FlushDiskType = FlushDiskType.SYNC_FLUSH
    """`SYNC_FLUSH`: an append is acknowledged and visible to consumers after the append is on disk. `ASYNC_FLUSH`:
    after the append is in the file."""
    flush_interval_commit_log_ms: Annotated[int, Field(ge=1, le=60_000)] = 500
    """With `ASYNC_FLUSH`: interval at which the commit log is flushed."""
    flush_commit_log_least_pages: Annotated[int, Field(ge=0, le=1 << 20)] = 4
    """With `ASYNC_FLUSH`: minimum number of dirty 4 KiB pages for a flush."""
    flush_commit_log_thorough_interval_ms: Annotated[int, Field(ge=1, le=600_000)] = 10_000
    """With `ASYNC_FLUSH`: maximum interval between flushes of all dirty pages of the commit log."""
    transient_store_pool_enable: bool = False
    """`true`, with `ASYNC_FLUSH`: appends go to buffers in memory, and a thread writes the buffers to the files in
    large pieces. If the process is killed, appends that are not yet in the files are lost."""
    transient_store_pool_size: Annotated[int, Field(ge=2, le=1024)] = 5
    """Number of buffers in the transient store pool. A buffer has 16 MiB, or the size of a commit-log file if
    smaller."""
    fast_fail_if_no_buffer_in_store_pool: bool = False
    """Rule for an append if the transient store pool has no free buffer. `true`: the store refuses the append as
    busy. `false`: the append first writes a buffer to its file."""
    commit_interval_commit_log_ms: Annotated[int, Field(ge=1, le=60_000)] = 200
    """Interval at which the thread of the transient store pool checks for buffers to write."""
    commit_commit_log_least_pages: Annotated[int, Field(ge=0, le=1 << 20)] = 4
    """Minimum number of 4 KiB pages of data that wait in the transient store pool. With fewer pages, the pool's thread
    waits before it writes them to the log files."""
    commit_commit_log_thorough_interval_ms: Annotated[int, Field(ge=1, le=600_000)] = 200
    """Interval at which the transient store pool's thread also writes fewer pages than `commit_commit_log_least_pages`,
    and makes their appends visible to consumers."""
    flush_interval_consume_queue_ms: Annotated[int, Field(ge=10, le=60_000)] = 1000
    """Interval in ms at which the consume queues are flushed and the checkpoint is written."""
    flush_consume_queue_least_pages: Annotated[int, Field(ge=0, le=1 << 20)] = 2
    """Minimum number of dirty 4 KiB pages for a flush of a consume queue. A queue with fewer dirty pages waits for
    `flush_consume_queue_thorough_interval_ms`."""
    flush_consume_queue_thorough_interval_ms: Annotated[int, Field(ge=1, le=600_000)] = 60_000
    """Maximum interval between flushes of all consume queues. Each snapshot also flushes all queues."""
    sync_flush_timeout_ms: Annotated[int, Field(ge=1, le=600_000)] = 5000
    """With `SYNC_FLUSH`: how long an append waits for the disk. After this time the append's status is
    `FLUSH_DISK_TIMEOUT`."""
    max_message_size_bytes: Annotated[int, Field(ge=1, le=MESSAGE_SIZE_LIMIT_BYTES)] = MAX_MESSAGE_SIZE_BYTES
    """Maximum size of a message's body; the whole record may be 64 KiB larger. Producers have a separate
    `max_message_size_bytes`. Readers decompress bodies up to the store's limit."""
    max_append_bytes: Annotated[int, Field(ge=1, le=1 << 34)] = 64 << 20
    """Maximum bytes of records in one append. A single record may exceed this limit."""
    check_compressed_body: bool | None = None
    """`true`: the store refuses a message whose compressed body does not decompress within `max_message_size_bytes`.
    `null`: the store checks this only if `access.enable` is true."""
    check_crc_on_recover: bool = True
    """`true`: recovery checks the CRC of each body. `false`: recovery checks only the structure of the records."""
    enabled_append_prop_crc: bool = False
    """`true`: the last property of each record is a CRC over the whole record. Recovery, replicas and readers check
    this CRC. With `true`, the store loses most of its throughput."""
    force_verify_prop_crc: bool = False
    """`true`: recovery checks the record's CRC property instead of the body's CRC. A record without the CRC property
    counts as damaged."""
    message_index_enable: bool = True
    """`true`: a thread builds an index of the log, so that queries find messages by key and by unique id."""
    max_hash_slot_num: Annotated[int, Field(ge=1, le=1 << 26)] = 5_000_000
    """Number of hash slots in an index file. After a change of this setting the store rebuilds all index files."""
    max_index_num: Annotated[int, Field(ge=2, le=1 << 28)] = 20_000_000
    """Number of entries in an index file; one entry stays unused. After a change of this setting the store rebuilds all
    index files."""
    max_msgs_num_batch: Annotated[int, Field(ge=1, le=10_000)] = 64
    """Maximum number of messages that a query by key or unique id returns."""
    query_wait_index_ms: Annotated[int, Field(ge=0, le=60_000)] = 3000
    """Maximum time, in ms, that a query by key or unique id waits until the index contains the newest records of the
    log."""
    file_reserved_time_hours: Annotated[int, Field(ge=0, le=24 * 365 * 100)] = 72
    """Minimum time for which the store keeps messages."""
    delete_when: Annotated[str, Field(pattern=r"^([01]?\d|2[0-3])(;([01]?\d|2[0-3]))*$")] = "04"
    """The hours of the day, in local time, at which the store deletes messages older than `file_reserved_time_hours`:
    `"04"`, or `"04;16"`."""
    clean_resource_interval_ms: Annotated[int, Field(ge=10, le=3_600_000)] = 10_000
    """Interval at which the store checks the age of its files and the used space of its disks."""
    compaction_schedule_interval_ms: Annotated[int, Field(ge=10, le=86_400_000)] = 900_000
    """Interval at which the store compacts its compaction topics."""
    delete_file_batch_max: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Maximum number of commit-log files that one deletion run deletes."""
    disk_max_used_space_ratio: Annotated[int, Field(ge=0, le=100)] = 75
    """Used percentage of the disk above which the store deletes old messages at any hour. Clamped to 10 to 95."""
    disk_space_clean_forcibly_ratio: Annotated[int, Field(ge=0, le=100)] = 85
    """Used percentage of the disk above which `clean_file_forcibly_enable` takes effect if it is true. Clamped to 30 to
    85."""
    disk_space_warning_level_ratio: Annotated[int, Field(ge=0, le=100)] = 90
    """Used percentage of the disk above which the store refuses appends. Clamped to 35 to 90."""
    clean_file_forcibly_enable: bool = False
    """`true`, RocketMQ's default: if the disk is full, the store deletes messages younger than
    `file_reserved_time_hours`, consumed or not. `false`: young messages stay, and the store refuses appends while its
    disk is full."""
    os_page_cache_busy_timeout_ms: Annotated[int, Field(ge=1, le=600_000)] = 1000
    """Maximum duration of one append, in ms. If an append takes longer, the store refuses other appends as
    busy."""
    send_queue_capacity: Annotated[int, Field(ge=1, le=1 << 20)] = 10_000
    """Maximum number of appends in flight at a store. Further appends get `SystemBusyError`."""
    wait_time_in_send_queue_ms: Annotated[int, Field(ge=1, le=600_000)] = 200
    """How long an append waits for the append lock before the store refuses it as busy."""
    pull_queue_capacity: Annotated[int, Field(ge=1, le=1 << 20)] = 100_000
    """Maximum number of fetches that wait for a thread at a store. Further fetches get `SystemBusyError`. A waiting
    long poll uses no thread; `fetch_waiters_max` limits long polls."""
    wait_time_in_pull_queue_ms: Annotated[int, Field(ge=1, le=600_000)] = 5000
    """How long a fetch waits for a thread before the store refuses it as busy."""
    admin_broker_queue_capacity: Annotated[int, Field(ge=1, le=1 << 20)] = 10_000
    """Maximum number of calls for offsets, timestamps and similar values that wait for a thread at a store."""
    wait_time_in_admin_broker_queue_ms: Annotated[int, Field(ge=1, le=600_000)] = 5000
    """How long a call for offsets, timestamps and similar values waits for a thread before the store refuses the call
    as busy."""
    put_hooks: tuple[str, ...] = ()
    """Functions, as `package.module:name`, that the store calls with each batch before the batch is stored. A function
    may refuse messages."""
    consume_hooks: tuple[str, ...] = ()
    """Functions, as `package.module:name`, that the store calls with each batch that a fetch returns."""
    hook_timeout_ms: Annotated[int, Field(ge=1, le=60_000)] = 200
    """Maximum duration of one call of a hook. A longer call counts as failed."""
    put_hooks_must_succeed: bool = False
    """`true`: the store refuses messages as busy if their put hook failed. `false`: the store stores messages whose put
    hook failed."""
    max_mapped_bytes: Annotated[int, Field(ge=1 << 20, le=NUMBER_MAX)] = 64 << 30
    """Maximum address space for read-only memory maps of files. Above this limit the store unmaps the least
    used files."""
    max_mapped_files: Annotated[int, Field(ge=4, le=1 << 20)] = 512
    """Maximum number of files that are mapped or open at the same time. Each file takes a file descriptor."""
    max_filter_message_size_bytes: Annotated[int, Field(ge=CONSUME_QUEUE_UNIT_BYTES, le=1 << 30)] = (
        MAX_FILTER_MESSAGE_SIZE_BYTES
    )
    """Maximum number of consume-queue bytes (20 per message) that one fetch with a tag filter scans."""
    fetch_waiters_max: Annotated[int, Field(ge=1, le=1 << 20)] = 16_384
    """Maximum number of long polls that wait at a store. Further long polls get `SystemBusyError`."""
    dedup_producers_max: Annotated[int, Field(ge=1, le=10_000_000)] = 20_000
    """Maximum number of (producer, queue) pairs in the store's deduplication table, which recognises messages that were
    sent twice."""
    message_delay_level: str = DELAY_LEVELS
    """The delays of delay levels 1, 2, … as numbers with s, m, h or d; at most 18 levels."""
    transaction_time_out_ms: Annotated[int, Field(ge=1, le=86_400_000)] = 6000
    """Age of a half message after which the broker asks the producers for the transaction's outcome."""
    transaction_check_max: Annotated[int, Field(ge=1, le=10_000)] = 15
    """Maximum number of times that the broker asks producers for the outcome of a half message. After the last time,
    the message goes to TRANS_CHECK_MAX_TIME_TOPIC."""
    transaction_op_msg_max_size: Annotated[int, Field(ge=16, le=1 << 20)] = 4096
    """Maximum number of characters in an op record, which names ended transactions. Several ended transactions share an
    op record up to this size."""
    transaction_open_max: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    """Maximum number of open half messages in a store. Further half messages get SystemBusyError."""
    reject_transaction_message: bool = False
    """`true`: the store refuses half messages with NoPermissionError."""
    enable_lmq: bool = False
    """`true`, together with `enable_multi_dispatch`: the store also puts a message into the light queues that the
    message names. Otherwise the store refuses messages that name light queues."""
    enable_multi_dispatch: bool = False
    """`true`: a message may be in several queues. Even with `false`, messages that RocketMQ put into several queues are
    found in all these queues."""
    max_lmq_consume_queue_num: Annotated[int, Field(ge=0, le=10_000_000)] = 20_000
    """Maximum number of light queues in a store. A message that needs a further light queue is refused. A queue whose
    messages have all expired does not count."""
    scrub_period_hours: Annotated[int, Field(ge=0, le=24 * 366)] = 168
    """Period in which the store reads and checks each of its files once, to find damage before a reader does. 0: only
    by command (`raymq store verify --now`)."""
    scrub_rate_max_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 32)] = 5_000_000
    """Maximum number of bytes per second that the periodic check reads. It reads more slowly if the period allows it,
    and takes at most 2 % of a core."""
    access_message_in_memory_max_ratio: Annotated[int, Field(ge=1, le=100)] = 40
    """Percentage of the machine's memory that is assumed to hold the newest messages. With `slave_read_enable`,
    consumers read older messages from slaves."""

    @field_validator("put_hooks", "consume_hooks")
    @classmethod
    def _hook_paths(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not _HOOK_PATH.fullmatch(path):
                raise ValueError(f"{path!r} is not an import path such as package.module:name")
        if len(set(paths)) < len(paths):
            raise ValueError("a hook is listed twice")
        return paths

    @field_validator("store_path_commit_log", "read_only_commit_log_store_paths")
    @classmethod
    def _absolute(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        absolute = tuple(absolute_path(path) for path in paths)
        if len(set(absolute)) < len(absolute):
            raise ValueError("a directory is listed twice")
        return absolute

    @model_validator(mode="after")
    def _log_can_grow(self) -> Self:
        if self.store_path_commit_log and not self.log_directories_elsewhere:
            raise ValueError(
                "read_only_commit_log_store_paths contains all directories of store_path_commit_log, so the "
                "store has no directory to write to"
            )
        return self

    @field_validator("message_delay_level")
    @classmethod
    def _delay_levels(cls, text: str) -> str:
        try:
            parse_delay_levels(text)
        except InvalidArgumentError as error:
            raise ValueError(str(error)) from None
        return text

    @model_validator(mode="after")
    def _pool_fits(self) -> Self:
        if self.transient_store_pool_enable and self.flush_disk_type is not FlushDiskType.ASYNC_FLUSH:
            raise ValueError(
                "transient_store_pool_enable needs flush_disk_type ASYNC_FLUSH, because messages in the pool "
                "are not on disk yet"
            )
        return self

    @field_validator("mapper_file_size_batch_consume_queue_bytes")
    @classmethod
    def _whole_batch_units(cls, size: int) -> int:
        return -(-size // BATCH_UNIT_BYTES) * BATCH_UNIT_BYTES

    @property
    def log_directories_elsewhere(self) -> list[Path]:
        """The directories in which new commit-log files may be created: `store_path_commit_log` without the read-only
        directories."""
        return [path for path in self.store_path_commit_log if path not in self.read_only_commit_log_store_paths]

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """The delays of delay levels 1, 2 and so on, in ms."""
        return parse_delay_levels(self.message_delay_level)

    @property
    def warms_up_log(self) -> bool:
        """True if a thread prefaults the log's next pages. With SYNC_FLUSH prefaulting gains nothing, because each
        append waits for the disk. With the transient store pool, writes need no prefaulted pages."""
        is_async = self.flush_disk_type is FlushDiskType.ASYNC_FLUSH
        return self.warm_mapped_file_enable and is_async and not self.transient_store_pool_enable

    @field_validator("mapped_file_size_consume_queue_bytes")
    @classmethod
    def _whole_units(cls, size: int) -> int:
        return -(-size // CONSUME_QUEUE_UNIT_BYTES) * CONSUME_QUEUE_UNIT_BYTES

    @property
    def clean_forcibly_ratio(self) -> float:
        """The used ratio of a disk, from 0 to 1, above which the disk gets no new commit-log file, and old files are
        deleted at any hour. The setting is clamped to RocketMQ's bounds (spec/storage.md §9)."""
        return min(max(self.disk_space_clean_forcibly_ratio, 30), 85) / 100


class StoreSettings(StoreOptions):
    """The path and the options of one store directory.

    All parts of an open store share one instance of this class. Each part reads a setting at the moment of use, so that
    changes of live settings (raymq.common.config.live) take effect. Only `change` may modify the instance.
    """

    model_config = ConfigDict(frozen=False, extra="forbid")

    store_path_root_dir: Path
    """The store directory. It is created if it does not exist."""

    @property
    def commit_log_directories(self) -> tuple[Path, ...]:
        """All directories with files of the commit log."""
        written = self.store_path_commit_log or (self.store_path_root_dir / COMMIT_LOG_DIR,)
        return tuple(dict.fromkeys((*written, *self.read_only_commit_log_store_paths)))

    def change(self, options: StoreOptions, names: Iterable[str]) -> None:
        """Copy the values of the settings `names` from `options`, a complete set of settings that were checked
        together. Thread-safe."""
        for name in names:
            setattr(self, name, getattr(options, name))
