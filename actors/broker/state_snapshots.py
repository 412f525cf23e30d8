"""The snapshots of a broker's state in the stores of its group, and the records that retention must keep for them.

This module decides if a store's snapshot is valid; the files and their format are in actors.core.broker.snapshot.

    config/  ← topics, groups, offsets, and last the position     (StateSnapshots.write)
             ← the position up to which retention may delete      (HOLDS_FILE): that of the previous snapshot

If the broker crashes between writing two files, the stored position is older than the other files. The records from
that position on are then applied again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from actors.core.broker.snapshot import dump_snapshot, load_snapshot
from actors.core.broker.state import BrokerState
from raymq.common.errors import RaymqError, StoreCorruptError
from raymq.common.names import STATE_TOPIC
from raymq.common.protocol.store import QueueBounds
from raymq.remoting.storage_client import StorageClient
from storage.files.config_files import parse_fastjson
from storage.retention.cleaner import HOLDS_FILE

CALL_TIMEOUT_S: Final = 5.0
"""Timeout, in seconds, of one call to a store. If the store hangs, another replica becomes the master long before this
timeout."""

logger = logging.getLogger(__name__)


class StateSnapshots:
    """Reads and writes the snapshots of one broker's state. Only one thread at a time may call a method."""

    def __init__(self, broker_name: str) -> None:
        self._broker_name = broker_name
        self._positions: dict[str, int] = {}
        """The log position of the last complete snapshot in each store, by the store's name. Stores whose position is
        unknown are missing."""

    def read(
        self, storage: StorageClient, copies: Sequence[StorageClient] = ()
    ) -> tuple[BrokerState, int, QueueBounds]:
        """Read the snapshot in a store. Returns the state, the log position of the first record that the state may
        lack, and the bounds of the state topic's queue.

        If a file of the snapshot is missing or damaged, and the log no longer has the records before the snapshot, the
        snapshot is read from another replica (`copies`) and written to the store again. Raises StoreCorruptError if no
        replica has it; nothing is changed then. A state that lacks topics would make replicas delete their queues.
        """
        bounds = storage.queue_bounds(STATE_TOPIC, 0, CALL_TIMEOUT_S)
        try:
            state, position = _load(storage)
            lack = f"it begins at state record {position}, but the log begins at {bounds.min_offset}"
        except StoreCorruptError as error:
            state, position, lack = BrokerState(), -1, str(error)
        if position < bounds.min_offset:
            state, position = self._read_copy(storage, copies, bounds, lack)
        # Limit retention (HOLDS_FILE) before any change is stored: from now on retention keeps the state's records
        # until a snapshot includes them.
        if storage.control("read_config", HOLDS_FILE, timeout_s=CALL_TIMEOUT_S) is None:
            _hold_records(storage, position)
        if position > bounds.max_offset:
            # The snapshot includes records that the log has lost. If it stayed, new records at the lost positions would
            # count as already included. So write a new snapshot that ends at the log's end.
            logger.warning(
                "broker %s: the state snapshot in %s is written again: it ends at %d, after the log's end at %d",
                *(self._broker_name, storage.name, position, bounds.max_offset),
            )
            position = bounds.max_offset
            _write(storage, dump_snapshot(state, position))
        self._positions[storage.name] = position
        return state, position, bounds

    def _read_copy(
        self, storage: StorageClient, copies: Sequence[StorageClient], bounds: QueueBounds, lack: str
    ) -> tuple[BrokerState, int]:
        """Read the snapshot from another replica, and write it to `storage`, whose own snapshot has the problem
        `lack`."""
        for copy in copies:
            try:
                state, position = _load(copy)
            except RaymqError as error:
                logger.warning("broker %s cannot read the snapshot of %s: %s", self._broker_name, copy.name, error)
                continue
            if bounds.min_offset <= position <= bounds.max_offset:
                logger.error(
                    "broker %s: the state snapshot in %s cannot be used, and is written again from %s: %s",
                    *(self._broker_name, storage.name, copy.name, lack),
                )
                _write(storage, dump_snapshot(state, position))
                return state, position
        raise StoreCorruptError(
            f"the topics, groups and offsets in config/ of {storage.name} cannot be used, no other replica has them, "
            f"and the log no longer has all their records: {lack}. Restore these files from a backup of the store"
        )

    def write(self, store: StorageClient, files: Mapping[str, str], position: int) -> None:
        """Write a snapshot's files to one store, in order, and stop at the first failure.

        The file with the log position is written last, because the position must not be newer than any other file.
        """
        _write(store, files)
        known = self._positions.get(store.name)
        if known is not None:
            # Make retention keep all state records from the previous snapshot's position on, not only from the new
            # snapshot's position. After a crash between two files the previous snapshot counts.
            _hold_records(store, known)
        self._positions[store.name] = position


def _load(store: StorageClient) -> tuple[BrokerState, int]:
    return load_snapshot(lambda name: store.control("read_config", name, timeout_s=CALL_TIMEOUT_S), parse_fastjson)


def _write(store: StorageClient, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        store.control("write_config", name, text, timeout_s=CALL_TIMEOUT_S)


def _hold_records(store: StorageClient, position: int) -> None:
    """Tell retention which state records of the broker a store must keep: the records from `position` on. The snapshots
    include all earlier records."""
    _write(store, {HOLDS_FILE: json.dumps({STATE_TOPIC: {"0": position}})})
