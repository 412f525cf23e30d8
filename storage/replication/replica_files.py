"""The files that identify a store directory as a replica: its id, and the newest sync-state set and the newest members
of its broker group that the replica received.

On disk
    config/replica.json         {"storeId": "9f…", "incarnation": 4}
    config/syncStateSet.json    {"epoch": 6, "version": 9, "stores": {"0": "9f…", "1": "c2…"}}
    config/replicaMembers.json  {"version": 3, "replicas": [0, 1], "joining": [1], …}; exists after a change of the
                                group's replicas

The id is created with the directory and lost with it: a new directory at the same path is another store. The
incarnation counts how often the store was opened; it is written to disk before the directory is used. A crash leaves
the old or the new text of a file.
"""

from __future__ import annotations

import json
import secrets
from typing import Any, Final

from raymq.common.errors import StoreCorruptError
from storage.files.config_files import ConfigFiles
from storage.replication.epochs import ReplicaMembers, SyncStateSet

REPLICA_FILE: Final = "replica.json"
SET_FILE: Final = "syncStateSet.json"
MEMBERS_FILE: Final = "replicaMembers.json"


class ReplicaFiles:
    """The replica's id, incarnation and sync-state set in one store directory. Not thread-safe. Each change is on disk
    when the method returns."""

    def __init__(self, config: ConfigFiles) -> None:
        """Read the replica's files and increase its incarnation by one. Raises StoreCorruptError if a file cannot be
        parsed."""
        self._config = config
        known = _parse(config.read(REPLICA_FILE) or "{}")
        self.store_id = str(known.get("storeId") or secrets.token_hex(8))
        self.incarnation = int(known.get("incarnation", 0)) + 1
        config.write(REPLICA_FILE, json.dumps({"storeId": self.store_id, "incarnation": self.incarnation}))
        self.sync_state_set = self._read_set()
        self.members = read_members(config)

    def note_set(self, newest: SyncStateSet) -> None:
        """Store a sync-state set, if it is newer than the stored sync-state set."""
        known = self.sync_state_set
        if known is None or newest.order > known.order:
            stores = {str(replica): store_id for replica, store_id in sorted(newest.stores.items())}
            text = json.dumps({"epoch": newest.epoch, "version": newest.version, "stores": stores})
            self._config.write(SET_FILE, text)
            self.sync_state_set = newest

    def note_members(self, newest: ReplicaMembers) -> None:
        """Store the members of the broker group, if they are newer than the stored members."""
        if self.members is None or newest.version > self.members.version:
            self._config.write(MEMBERS_FILE, json.dumps(newest.to_plain()))
            self.members = newest

    def _read_set(self) -> SyncStateSet | None:
        text = self._config.read(SET_FILE)
        if text is None:
            return None
        fields = _parse(text)
        try:
            stores = {int(replica): str(store_id) for replica, store_id in fields["stores"].items()}
            return SyncStateSet(int(fields["epoch"]), int(fields["version"]), stores)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise StoreCorruptError(
                f"file {self._config.directory / SET_FILE} does not contain a sync-state set: {text[:200]}; empty "
                "the store directory and let another replica fill it"
            ) from None


def _parse(text: str) -> dict[str, Any]:
    return dict(json.loads(text))


def read_members(config: ConfigFiles) -> ReplicaMembers | None:
    """Return the newest members of the broker group that the replica with these files has received; None if the group's
    replicas were never changed. Raises StoreCorruptError if the file cannot be parsed."""
    text = config.read(MEMBERS_FILE)
    if text is None:
        return None
    try:
        return ReplicaMembers.from_plain(_parse(text))
    except (KeyError, TypeError, ValueError):
        raise StoreCorruptError(
            f"file {config.directory / MEMBERS_FILE} does not contain the replicas of a broker group: {text[:200]}; "
            "copy the file from another replica of the group"
        ) from None
