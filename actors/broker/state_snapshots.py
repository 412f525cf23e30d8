"""The snapshots of a broker's state in the stores of its group, and the records that retention must keep for them.

A change of when a store's snapshot counts belongs here; their files and shape are in actors.core.broker.snapshot.

    config/  ← topics, groups, offsets, and last the position     (StateSnapshots.write)
             ← the position up to which retention may delete      (HOLDS_FILE), that of the snapshot before

A crash between two files leaves an older position, from which the records are applied again.
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
"""The timeout of one call to a store: if the store stands still, another replica leads long before."""

logger = logging.getLogger(__name__)


class StateSnapshots:
    """The snapshots of one broker's state. Each method is called by one thread at a time."""

    def __init__(self, broker_name: str) -> None:
        self._broker_name = broker_name
        self._positions: dict[str, int] = {}
        """The position of the last whole snapshot in each store, by its name, as far as that is known."""

    def read(self, storage: StorageClient) -> tuple[BrokerState, int, QueueBounds]:
        """The state in a store's snapshot, the position of the first record that it may lack, and the bounds of the
        records there."""
        state, position = load_snapshot(
            lambda name: storage.control("read_config", name, timeout_s=CALL_TIMEOUT_S), parse_fastjson
        )
        # Before any change: from here on retention keeps the state's records until a snapshot has them.
        if storage.control("read_config", HOLDS_FILE, timeout_s=CALL_TIMEOUT_S) is None:
            _hold_records(storage, position)
        bounds = storage.queue_bounds(STATE_TOPIC, 0, CALL_TIMEOUT_S)
        if position > bounds.max_offset:
            # The log has lost its end, which the snapshot has. New records would count as being in the snapshot.
            logger.warning(
                "%s: the snapshot in %s ends at %d, its log at %d; written again",
                *(self._broker_name, storage.name, position, bounds.max_offset),
            )
            position = bounds.max_offset
            _write(storage, dump_snapshot(state, position))
        # Retention may have deleted the log's start beyond the snapshot's position: those records are in the snapshot.
        self._positions[storage.name] = position = max(position, bounds.min_offset)
        return state, position, bounds

    def write(self, store: StorageClient, files: Mapping[str, str], position: int) -> None:
        """Write a snapshot's files to one store, in order, up to the first that fails: the position, which is the last,
        must not be ahead of any of them."""
        _write(store, files)
        known = self._positions.get(store.name)
        if known is not None:
            # Not up to this snapshot: the files' .bak, which may be needed, have the one before.
            _hold_records(store, known)
        self._positions[store.name] = position


def _write(store: StorageClient, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        store.control("write_config", name, text, timeout_s=CALL_TIMEOUT_S)


def _hold_records(store: StorageClient, position: int) -> None:
    """Let a store's retention delete the state's records before `position`, which its snapshots have, and no others."""
    _write(store, {HOLDS_FILE: json.dumps({STATE_TOPIC: {"0": position}})})
