"""The snapshots of a broker's state in the stores of its group, and the records that retention must keep for them.

When a store's snapshot is valid belongs here; the files and their format are in actors.core.broker.snapshot.

    config/  ← topics, groups, offsets, and last the position     (StateSnapshots.write)
             ← the position up to which retention may delete      (HOLDS_FILE): that of the previous snapshot

A crash between two files leaves an older position; the records are applied again from there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Final

from actors.core.broker.snapshot import dump_snapshot, load_snapshot
from actors.core.broker.state import BrokerState
from raymq.common.names import STATE_TOPIC
from raymq.common.protocol.store import QueueBounds
from raymq.remoting.storage_client import StorageClient
from storage.files.config_files import parse_fastjson
from storage.retention.cleaner import HOLDS_FILE

CALL_TIMEOUT_S: Final = 5.0
"""The timeout of one call to a store. If the store hangs, another replica leads long before."""

logger = logging.getLogger(__name__)


class StateSnapshots:
    """The snapshots of one broker's state. Only one thread at a time calls each method."""

    def __init__(self, broker_name: str) -> None:
        self._broker_name = broker_name
        self._positions: dict[str, int] = {}
        """The position of the last complete snapshot in each store, by the store's name, as far as known."""

    def read(self, storage: StorageClient) -> tuple[BrokerState, int, QueueBounds]:
        """Return the state in a store's snapshot, the position of the first record that it may lack, and the records'
        bounds.
        """
        state, position = load_snapshot(
            lambda name: storage.control("read_config", name, timeout_s=CALL_TIMEOUT_S), parse_fastjson
        )
        # Hold before any change: from here on retention keeps the state's records until a snapshot has them.
        if storage.control("read_config", HOLDS_FILE, timeout_s=CALL_TIMEOUT_S) is None:
            _hold_records(storage, position)
        bounds = storage.queue_bounds(STATE_TOPIC, 0, CALL_TIMEOUT_S)
        if position > bounds.max_offset:
            # The snapshot has records that the log has lost. Without a new snapshot, new records would count as part of
            # it.
            logger.warning(
                "%s: the snapshot in %s ends at %d, its log at %d; written again",
                *(self._broker_name, storage.name, position, bounds.max_offset),
            )
            position = bounds.max_offset
            _write(storage, dump_snapshot(state, position))
        # Retention may have deleted the log's start past the snapshot's position: the snapshot has those records.
        self._positions[storage.name] = position = max(position, bounds.min_offset)
        return state, position, bounds

    def write(self, store: StorageClient, files: Mapping[str, str], position: int) -> None:
        """Write a snapshot's files to one store, in order, up to the first failure.

        The position is the last file, because it must not be ahead of any other file.
        """
        _write(store, files)
        known = self._positions.get(store.name)
        if known is not None:
            # Not up to this snapshot: the files' .bak copies, which may be needed, hold the previous one.
            _hold_records(store, known)
        self._positions[store.name] = position


def _write(store: StorageClient, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        store.control("write_config", name, text, timeout_s=CALL_TIMEOUT_S)


def _hold_records(store: StorageClient, position: int) -> None:
    """Let a store's retention delete only the state's records before `position`, which its snapshots have."""
    _write(store, {HOLDS_FILE: json.dumps({STATE_TOPIC: {"0": position}})})
