"""The components of one open store: its files, and the tables in memory that are derived from the files.

If several services need a component, this module creates it once, when the store is opened. Each service gets all
components, and uses the ones that it needs.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass

from raymq.common.config.store import StoreSettings
from raymq.records.logfiles.log_reader import LogReader
from storage.dispatch.dedup import DedupTable
from storage.dispatch.delivery_progress import DeliveryProgress
from storage.dispatch.half_messages import HalfMessages
from storage.dispatch.held_units import HeldUnits
from storage.dispatch.visibility import Visibility
from storage.files.config_files import ConfigFiles
from storage.files.damage import DamageNotes
from storage.files.reserve import SpaceReserve, reserve_bytes
from storage.files.write_handles import WriteHandles
from storage.index.appended_batches import RECORDS_MAX, AppendedBatches
from storage.log.commit_log import CommitLog
from storage.log.holes import HoleTable
from storage.queue.queue_table import QueueTable


@dataclass(frozen=True, slots=True)
class StoreParts:
    """The components of one open store. Each component documents which threads may use it."""

    # The settings with which the store was opened.
    settings: StoreSettings
    # True if the store was not closed cleanly the last time.
    after_crash: bool
    # Reads the log and the consume queues through memory maps.
    reader: LogReader
    # Disk space that is reserved for the broker's state. It is used if the disk is full.
    space: SpaceReserve
    # The files of the broker in the directory config/.
    config: ConfigFiles
    # The commit log: all messages of the store, in the order in which they were stored.
    log: CommitLog
    # The damaged ranges of the log.
    holes: HoleTable
    # The consume queues, by topic and queue id.
    queues: QueueTable
    # The table of the messages that each producer has stored in each queue. It recognises messages that are sent twice.
    dedup: DedupTable
    # The delivery progress of each queue of delayed messages.
    deliveries: DeliveryProgress
    # The half messages: messages of transactions without an outcome.
    halves: HalfMessages
    # The messages that are written, but not yet visible to consumers.
    visibility: Visibility
    # The appended batches that are not yet in the index.
    appended: AppendedBatches
    # The append lock. While a thread holds this lock, log and queues are consistent, and no other thread changes them.
    append_lock: threading.Lock
    # The damage that this store has found in its files, except for damage in the log.
    damage: DamageNotes

    @classmethod
    def open(cls, settings: StoreSettings, resources: ExitStack, *, after_crash: bool) -> StoreParts:
        """Open all components of the store's directory, ready for recovery. They are closed when `resources` is closed.

        Raises StoreCorruptError if the files do not form a store, OSError if they cannot be read.
        """
        root = settings.store_path_root_dir
        reader = LogReader(
            root,
            commit_log_file_size=settings.mapped_file_size_commit_log_bytes,
            consume_queue_file_size=settings.mapped_file_size_consume_queue_bytes,
            consume_queue_ext_file_size=settings.mapped_file_size_consume_queue_ext_bytes,
            commit_log_directories=settings.commit_log_directories,
            max_filter_message_size=settings.max_filter_message_size_bytes,
            max_mapped_bytes=settings.max_mapped_bytes,
            max_mapped_files=settings.max_mapped_files,
        )
        resources.callback(reader.close)
        damage = DamageNotes()
        space = SpaceReserve(
            root,
            reserve_bytes(settings.mapped_file_size_consume_queue_bytes, settings.mapped_file_size_commit_log_bytes),
        )
        config = ConfigFiles(root, damage)
        log = CommitLog.of(settings)
        resources.callback(log.close)
        max_open = settings.max_mapped_files
        handles = HeldUnits(max_open, log=log) if log.has_pool else WriteHandles(max_open)
        queues = QueueTable(root, settings, reader, config, handles, after_crash=after_crash)
        resources.callback(queues.close)
        deliveries = DeliveryProgress()
        deliveries.load(config)
        dedup = DedupTable(settings.dedup_producers_max)
        appended = AppendedBatches(RECORDS_MAX if settings.message_index_enable else 0)
        return cls(
            settings,
            after_crash,
            reader,
            space,
            config,
            log,
            HoleTable(root, damage),
            queues,
            dedup,
            deliveries,
            HalfMessages(),
            Visibility(),
            appended,
            threading.Lock(),
            damage,
        )
