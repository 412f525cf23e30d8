"""The keys of records that were damaged when the index thread first read them, and were repaired later.

On disk
    index.mended    1a2b3c4d                                    the CRC-32 of the rest
                    [[key hash, physical offset, store time in ms], …]
    index.mended.bak    the same (storage/files/two_copies.py)

An index file takes entries in log order, so the keys of an older record cannot be added to the newest file. The table
is small, because only records that were damaged enter it. A search reads this table and the index files. RocketMQ
ignores the table; it finds these records after the index files are rebuilt from the log.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Final, NamedTuple

from raymq.common.errors import StoreCorruptError
from storage.files.damage import DamageNotes
from storage.files.two_copies import CHECKSUM_LINE, TwoCopies

MENDED_KEYS_FILE: Final = "index.mended"
MENDED_KEYS_MAX: Final = 100_000
"""Maximum number of keys in the table of repaired records. If there are more, the keys of the oldest records are
dropped and this is logged."""

logger = logging.getLogger(__name__)


class MendedKey(NamedTuple):
    """A key of a repaired record: the key's hash, the record's physical offset, and the record's store time in
    ms."""

    key_hash: int
    physical_offset: int
    store_timestamp_ms: int


class MendedKeys:
    """The index keys of the records that were damaged and then repaired in one store. One thread at a time may add
    keys; any thread may search."""

    def __init__(self, root: Path, min_offset: int, end_offset: int, damage: DamageNotes) -> None:
        """Read index.mended, if it exists, and drop the keys of records that are no longer in the log. Raises OSError
        if the disk fails.

        The log reaches from `min_offset` to `end_offset`. If the file cannot be read, this is recorded in `damage`.
        """
        self._copies = TwoCopies(root / MENDED_KEYS_FILE, CHECKSUM_LINE, damage)
        self._keys: tuple[MendedKey, ...] = ()
        """The index keys of all repaired records. The keys of the newest records come first."""
        try:
            keys = [MendedKey(*map(int, row)) for row in json.loads(self._copies.read() or b"[]")]
            self._keys = tuple(key for key in keys if min_offset <= key.physical_offset < end_offset)
        except (StoreCorruptError, TypeError, ValueError) as error:
            damage.note(f"queries by key do not find some repaired records: {error}")

    def add(self, keys: list[MendedKey]) -> None:
        """Add index keys of records that were repaired with another replica's bytes. On return the keys are on disk.
        After an OSError the table is unchanged."""
        merged = sorted({*self._keys, *keys}, key=lambda key: key.physical_offset, reverse=True)
        if len(merged) > MENDED_KEYS_MAX:
            logger.error(
                "file %s is full: %d keys of repaired records are dropped",
                self._copies.path,
                len(merged) - MENDED_KEYS_MAX,
            )
            del merged[MENDED_KEYS_MAX:]
        self._copies.write(json.dumps(merged).encode())
        self._keys = tuple(merged)

    def find(self, key_hash: int, begin_ms: int, end_ms: int) -> list[int]:
        """Return the physical offsets of repaired records that may have a key with the hash `key_hash` and were stored
        in [`begin_ms`, `end_ms`]. The newest records come first."""
        return [
            key.physical_offset
            for key in self._keys
            if key.key_hash == key_hash and begin_ms <= key.store_timestamp_ms <= end_ms
        ]
