"""The settings of a store directory, validated: the section `store` of raymq.yaml, and where the directory is.

Names are RocketMQ's in snake_case, with the unit at the end; defaults are RocketMQ's where design.md does not say
otherwise (spec/storage.md §6).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from raymq.common.config.section import SettingsSection
from raymq.common.delay import DELAY_LEVELS, parse_delay_levels
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES, MESSAGE_SIZE_LIMIT_BYTES
from raymq.common.numbers import NUMBER_MAX

CONSUME_QUEUE_UNIT_BYTES: Final = 20
"""A unit of a consume queue: UNIT_DTYPE of raymq.records.format.layout."""
BATCH_UNIT_BYTES: Final = 46
"""A unit of a batch consume queue: BATCH_UNIT_DTYPE of raymq.records.format.layout."""
MAX_FILTER_MESSAGE_SIZE_BYTES: Final = CONSUME_QUEUE_UNIT_BYTES << 18
"""The units of 262,144 messages."""
CONSUME_QUEUE_EXT_FILE_BYTES: Final = 48 << 20
COMMIT_LOG_DIR: Final = "commitlog"
_HOOK_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def absolute_path(path: Path) -> Path:
    """The path from the root on, `~` resolved. ValueError when there is no such user."""
    try:
        return path.expanduser().absolute()
    except RuntimeError as error:  # no such user
        raise ValueError(str(error)) from None


class FlushDiskType(Enum):
    """The moment at which an append is acknowledged: SYNC_FLUSH when its bytes are on disk, ASYNC_FLUSH when they are
    in the file's page cache."""

    SYNC_FLUSH = "SYNC_FLUSH"
    ASYNC_FLUSH = "ASYNC_FLUSH"


class StoreOptions(SettingsSection):
    """The options of a store directory: the size of its files, its flushes, its bounds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store_path_commit_log: Annotated[
        tuple[Path, ...],
        Field(
            description="Directories, best on disks of their own, in which the commit log's files take turns; none: "
            "`commitlog` in the store directory. Of several stores each has a directory of its own below them."
        ),
    ] = ()
    read_only_commit_log_store_paths: Annotated[
        tuple[Path, ...],
        Field(
            description="Directories that hold files of the commit log and get no new ones; among the former or not."
        ),
    ] = ()
    mapped_file_size_commit_log_bytes: Annotated[
        int,
        Field(ge=64, le=1 << 34, description="Size of a commit-log file. Fixed for the life of a store directory."),
    ] = 1 << 30
    mapped_file_size_consume_queue_bytes: Annotated[
        int,
        Field(
            ge=CONSUME_QUEUE_UNIT_BYTES,
            le=1 << 30,
            description="Size of a consume-queue file, rounded up to whole units of 20 bytes. Fixed like the former.",
        ),
    ] = 6_000_000
    enable_consume_queue_ext: Annotated[
        bool,
        Field(description="Whether a message's tag code and store time go to an extension of its consume queue."),
    ] = False
    mapped_file_size_consume_queue_ext_bytes: Annotated[
        int,
        Field(ge=64, le=1 << 30, description="Size of a file of such an extension. Fixed like the former two."),
    ] = CONSUME_QUEUE_EXT_FILE_BYTES
    warm_mapped_file_enable: Annotated[
        bool,
        Field(description="ASYNC_FLUSH: a thread has the log's next pages in memory before a fast writer."),
    ] = False
    mapper_file_size_batch_consume_queue_bytes: Annotated[
        int,
        Field(
            ge=BATCH_UNIT_BYTES,
            le=1 << 30,
            description="The same for queues of inner batches: whole units of 46 bytes.",
        ),
    ] = 300_000 * BATCH_UNIT_BYTES
    flush_disk_type: Annotated[
        FlushDiskType,
        Field(description="SYNC_FLUSH acknowledges an append, and shows it to consumers, once it is on disk."),
    ] = FlushDiskType.SYNC_FLUSH
    flush_interval_commit_log_ms: Annotated[
        int, Field(ge=1, le=60_000, description="ASYNC_FLUSH: how often the commit log is flushed.")
    ] = 500
    flush_commit_log_least_pages: Annotated[
        int, Field(ge=0, le=1 << 20, description="ASYNC_FLUSH: flush only when so many pages of 4 KiB are dirty.")
    ] = 4
    flush_commit_log_thorough_interval_ms: Annotated[
        int, Field(ge=1, le=600_000, description="ASYNC_FLUSH: flush whatever is dirty at least this often.")
    ] = 10_000
    transient_store_pool_enable: Annotated[
        bool,
        Field(
            description="ASYNC_FLUSH: appends go to buffers in memory and from there to the files, in large pieces. A "
            "killed process loses what it had not written there yet."
        ),
    ] = False
    transient_store_pool_size: Annotated[
        int,
        Field(ge=2, le=1024, description="How many such buffers, of 16 MiB each, or a file's size if that is less."),
    ] = 5
    fast_fail_if_no_buffer_in_store_pool: Annotated[
        bool, Field(description="Whether an append without a free buffer is refused, as busy, or else writes one out.")
    ] = False
    commit_interval_commit_log_ms: Annotated[
        int,
        Field(ge=1, le=60_000, description="How often it is looked whether buffers are to be written to the files."),
    ] = 200
    commit_commit_log_least_pages: Annotated[
        int, Field(ge=0, le=1 << 20, description="So many pages of 4 KiB in the buffers are written at once.")
    ] = 4
    commit_commit_log_thorough_interval_ms: Annotated[
        int, Field(ge=1, le=600_000, description="Fewer are written, and shown to consumers, this often.")
    ] = 200
    flush_interval_consume_queue_ms: Annotated[
        int, Field(ge=10, le=60_000, description="How often the consume queues are flushed and the checkpoint written.")
    ] = 1000
    flush_consume_queue_least_pages: Annotated[
        int, Field(ge=0, le=1 << 20, description="A queue with fewer dirty pages of 4 KiB waits for the next setting.")
    ] = 2
    flush_consume_queue_thorough_interval_ms: Annotated[
        int,
        Field(ge=1, le=600_000, description="Flush all queues at least this often; each snapshot does so, too."),
    ] = 60_000
    sync_flush_timeout_ms: Annotated[
        int,
        Field(ge=1, le=600_000, description="SYNC_FLUSH: how long an append waits before it says FLUSH_DISK_TIMEOUT."),
    ] = 5000
    max_message_size_bytes: Annotated[
        int, Field(ge=1, le=MESSAGE_SIZE_LIMIT_BYTES, description="Longest body; a record may have 64 KiB more.")
    ] = MAX_MESSAGE_SIZE_BYTES
    max_append_bytes: Annotated[
        int,
        Field(ge=1, le=1 << 34, description="Longest records of one append in all; a single one may always be sent."),
    ] = 64 << 20
    check_compressed_body: Annotated[
        bool | None,
        Field(
            description="Whether compressed bodies that do not decompress within max_message_size_bytes are refused. "
            "Unset: only with access on."
        ),
    ] = None
    check_crc_on_recover: Annotated[
        bool, Field(description="Whether recovery checks the bodies' CRC. Off: only the structure of the records.")
    ] = True
    enabled_append_prop_crc: Annotated[
        bool, Field(description="Whether a CRC over the whole record is its last property.")
    ] = False
    force_verify_prop_crc: Annotated[
        bool, Field(description="Whether recovery checks that CRC instead of the body's; a record without one is cut.")
    ] = False
    message_index_enable: Annotated[
        bool, Field(description="Whether messages are found by key and unique id: an index is built beside the log.")
    ] = True
    max_hash_slot_num: Annotated[
        int, Field(ge=1, le=1 << 26, description="Hash slots of an index file. Another number has it all made again.")
    ] = 5_000_000
    max_index_num: Annotated[
        int, Field(ge=2, le=1 << 28, description="Entries of an index file, one more than are used. Like the former.")
    ] = 20_000_000
    max_msgs_num_batch: Annotated[int, Field(ge=1, le=10_000, description="Most messages that a query returns.")] = 64
    query_wait_index_ms: Annotated[
        int, Field(ge=0, le=60_000, description="How long a query waits for the index to reach the end of the log.")
    ] = 3000
    file_reserved_time_hours: Annotated[
        int, Field(ge=0, le=24 * 365 * 100, description="How long messages are kept at least.")
    ] = 72
    delete_when: Annotated[
        str,
        Field(
            pattern=r"^([01]?\d|2[0-3])(;([01]?\d|2[0-3]))*$",
            description='The hours of the day, local time, at which older messages are deleted: "04", or "04;16".',
        ),
    ] = "04"
    clean_resource_interval_ms: Annotated[
        int, Field(ge=10, le=3_600_000, description="How often the age of the files and the disk are looked at.")
    ] = 10_000
    compaction_schedule_interval_ms: Annotated[
        int, Field(ge=10, le=86_400_000, description="How often topics with cleanup.policy COMPACTION are compacted.")
    ] = 900_000
    delete_file_batch_max: Annotated[
        int, Field(ge=1, le=10_000, description="Most commit-log files deleted at a time.")
    ] = 10
    disk_max_used_space_ratio: Annotated[
        int, Field(ge=0, le=100, description="Percent of the disk from which on old messages go at any hour. 10 to 95.")
    ] = 75
    disk_space_clean_forcibly_ratio: Annotated[
        int,
        Field(ge=0, le=100, description="Percent from which on clean_file_forcibly_enable, if on, applies. 30 to 85."),
    ] = 85
    disk_space_warning_level_ratio: Annotated[
        int, Field(ge=0, le=100, description="Percent from which on the store refuses appends. 35 to 90.")
    ] = 90
    clean_file_forcibly_enable: Annotated[
        bool,
        Field(
            description="Whether a full disk deletes messages younger than file_reserved_time_hours, consumed or not. "
            "Off: they stay, and a full disk refuses appends. RocketMQ's default is on."
        ),
    ] = False
    os_page_cache_busy_timeout_ms: Annotated[
        int, Field(ge=1, le=600_000, description="An append that takes longer has the others refused, as busy.")
    ] = 1000
    send_queue_capacity: Annotated[
        int, Field(ge=1, le=1 << 20, description="Appends at a store at a time; one more gets SystemBusyError.")
    ] = 10_000
    wait_time_in_send_queue_ms: Annotated[
        int, Field(ge=1, le=600_000, description="How long an append waits for its turn before it is refused, as busy.")
    ] = 200
    pull_queue_capacity: Annotated[
        int, Field(ge=1, le=1 << 20, description="Fetches that wait for a thread; one more gets SystemBusyError.")
    ] = 100_000
    wait_time_in_pull_queue_ms: Annotated[
        int, Field(ge=1, le=600_000, description="How long a fetch waits for a thread before it is refused, as busy.")
    ] = 5000
    admin_broker_queue_capacity: Annotated[
        int, Field(ge=1, le=1 << 20, description="The same for calls that ask for offsets, times and the like.")
    ] = 10_000
    wait_time_in_admin_broker_queue_ms: Annotated[
        int, Field(ge=1, le=600_000, description="How long such a call waits for a thread before it is refused.")
    ] = 5000
    put_hooks: Annotated[
        tuple[str, ...],
        Field(
            description="Functions, as `package.module:name`, that see each batch before it is stored and may refuse."
        ),
    ] = ()
    consume_hooks: Annotated[
        tuple[str, ...],
        Field(description="Functions, as `package.module:name`, that see each batch that a fetch hands out."),
    ] = ()
    hook_timeout_ms: Annotated[
        int, Field(ge=1, le=60_000, description="How long a hook may take for one request; then it has failed.")
    ] = 200
    put_hooks_must_succeed: Annotated[
        bool,
        Field(description="Whether messages whose put hook failed are refused, as busy. Off: they are stored."),
    ] = False
    max_mapped_bytes: Annotated[
        int,
        Field(
            ge=1 << 20,
            le=NUMBER_MAX,
            description="Address space for read-only maps of files; the least used are dropped.",
        ),
    ] = 64 << 30
    max_mapped_files: Annotated[
        int, Field(ge=4, le=1 << 20, description="Files mapped, or held open, at a time; each costs a descriptor.")
    ] = 512
    max_filter_message_size_bytes: Annotated[
        int,
        Field(
            ge=CONSUME_QUEUE_UNIT_BYTES,
            le=1 << 30,
            description="How much of a consume queue, 20 bytes a message, one fetch looks through for its tags.",
        ),
    ] = MAX_FILTER_MESSAGE_SIZE_BYTES
    fetch_waiters_max: Annotated[
        int, Field(ge=1, le=1 << 20, description="Long polls held at a time; one more gets SystemBusyError.")
    ] = 16_384
    dedup_producers_max: Annotated[
        int,
        Field(ge=1, le=10_000_000, description="Producer and queue pairs remembered, to recognise repeats."),
    ] = 20_000
    message_delay_level: Annotated[
        str,
        Field(description="How long messages of delay level 1, 2, … wait: numbers with s, m, h or d; at most 18."),
    ] = DELAY_LEVELS
    transaction_time_out_ms: Annotated[
        int, Field(ge=1, le=86_400_000, description="How old a half message is before its producers are asked.")
    ] = 6000
    transaction_check_max: Annotated[
        int, Field(ge=1, le=10_000, description="How often its producers are asked before a half message is given up.")
    ] = 15
    transaction_op_msg_max_size: Annotated[
        int, Field(ge=16, le=1 << 20, description="Characters of an op record: so many ended transactions share one.")
    ] = 4096
    transaction_open_max: Annotated[
        int, Field(ge=1, le=10_000_000, description="Half messages without an outcome; one more gets SystemBusyError.")
    ] = 100_000
    reject_transaction_message: Annotated[
        bool, Field(description="Whether half messages are refused, with NoPermissionError.")
    ] = False
    enable_lmq: Annotated[
        bool, Field(description="With the next: whether messages go into the %LMQ% queues that they name, too.")
    ] = False
    enable_multi_dispatch: Annotated[
        bool, Field(description="Whether messages may be in several queues. Those that RocketMQ wrote are, anyhow.")
    ] = False
    max_lmq_consume_queue_num: Annotated[
        int, Field(ge=0, le=10_000_000, description="Most %LMQ% queues of a store; a message for one more is refused.")
    ] = 20_000
    access_message_in_memory_max_ratio: Annotated[
        int, Field(ge=1, le=100, description="Percent of the memory that is taken to hold the newest messages.")
    ] = 40

    @field_validator("put_hooks", "consume_hooks")
    @classmethod
    def _hook_paths(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            if not _HOOK_PATH.fullmatch(path):
                raise ValueError(f"{path!r} is not an import path like package.module:name")
        if len(set(paths)) < len(paths):
            raise ValueError("a hook is named twice")
        return paths

    @field_validator("store_path_commit_log", "read_only_commit_log_store_paths")
    @classmethod
    def _absolute(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        absolute = tuple(absolute_path(path) for path in paths)
        if len(set(absolute)) < len(absolute):
            raise ValueError("a directory is named twice")
        return absolute

    @model_validator(mode="after")
    def _log_can_grow(self) -> Self:
        if self.store_path_commit_log and not self.log_directories_elsewhere:
            raise ValueError(
                "read_only_commit_log_store_paths leaves no directory of store_path_commit_log to write to"
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
                "transient_store_pool_enable needs flush_disk_type ASYNC_FLUSH: what is only in the pool is not on disk"
            )
        return self

    @field_validator("mapper_file_size_batch_consume_queue_bytes")
    @classmethod
    def _whole_batch_units(cls, size: int) -> int:
        return -(-size // BATCH_UNIT_BYTES) * BATCH_UNIT_BYTES

    @property
    def log_directories_elsewhere(self) -> list[Path]:
        """The directories of store_path_commit_log where files may be made."""
        return [path for path in self.store_path_commit_log if path not in self.read_only_commit_log_store_paths]

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """The delays of level 1, 2, … in ms."""
        return parse_delay_levels(self.message_delay_level)

    @property
    def warms_up_log(self) -> bool:
        """True if the log's pages are made ahead of a fast writer. With SYNC_FLUSH each append waits for the disk
        anyway, and a pool's writes need no warm pages."""
        is_async = self.flush_disk_type is FlushDiskType.ASYNC_FLUSH
        return self.warm_mapped_file_enable and is_async and not self.transient_store_pool_enable

    @field_validator("mapped_file_size_consume_queue_bytes")
    @classmethod
    def _whole_units(cls, size: int) -> int:
        return -(-size // CONSUME_QUEUE_UNIT_BYTES) * CONSUME_QUEUE_UNIT_BYTES

    @property
    def clean_forcibly_ratio(self) -> float:
        """The ratio of used space, from 0 to 1, from which on a disk gets no new file of the log and old files are
        deleted at any hour: the setting within RocketMQ's bounds (spec/storage.md §9)."""
        return min(max(self.disk_space_clean_forcibly_ratio, 30), 85) / 100


class StoreSettings(StoreOptions):
    """One store directory: its path and its options.

    All parts of an open store share one of these, and read it when they need a value, so that live settings
    (raymq.common.config.live) take effect by `change`. It is the only way in which one changes.
    """

    model_config = ConfigDict(frozen=False, extra="forbid")

    store_path_root_dir: Annotated[Path, Field(description="The store directory; made if it does not exist.")]

    @property
    def commit_log_directories(self) -> tuple[Path, ...]:
        """All directories with files of the commit log."""
        written = self.store_path_commit_log or (self.store_path_root_dir / COMMIT_LOG_DIR,)
        return tuple(dict.fromkeys((*written, *self.read_only_commit_log_store_paths)))

    def change(self, options: StoreOptions, names: Iterable[str]) -> None:
        """Take over the options of these names, which were checked together with all others. Thread-safe."""
        for name in names:
            setattr(self, name, getattr(options, name))
