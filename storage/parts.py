"""The parts of one open store: its files, and the tables in memory that go with them.

A part that several of the store's services need is made here, once, when the store is opened. Each service gets all
parts, and uses those that it needs.
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
    """The parts of one open store. Each part documents which threads may use it."""

    # The settings the store was opened with.
    settings: StoreSettings
    # True if the store was not closed cleanly the last time it was open.
    after_crash: bool
    # Reads the log and the queues through maps.
    reader: LogReader
    # Space that is kept for the broker's state.
    space: SpaceReserve
    # The files in config/.
    config: ConfigFiles
    # The commit log: all messages of the store, in the order in which they were stored.
    log: CommitLog
    # The damaged ranges of the log.
    holes: HoleTable
    # The consume queues, by topic and queue id.
    queues: QueueTable
    # The messages that each producer has stored in each queue, to recognise messages that are sent twice.
    dedup: DedupTable
    # How far the scheduler has delivered each queue of delayed messages.
    deliveries: DeliveryProgress
    # The messages of transactions without an outcome.
    halves: HalfMessages
    # The messages that are written, but that consumers do not see yet.
    visibility: Visibility
    # The batches that the index has not put yet.
    appended: AppendedBatches
    # The append lock. Under it log and queues agree, and no other thread changes them.
    append_lock: threading.Lock
    # The damage found in files beside the log.
    damage: DamageNotes

    @classmethod
    def open(cls, settings: StoreSettings, resources: ExitStack, *, after_crash: bool) -> StoreParts:
        """Open everything in the store's directory, ready to be recovered. `resources` closes everything again.

        StoreCorruptError when the files do not form a store. OSError when they cannot be read.
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
