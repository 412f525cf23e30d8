"""The rule of compaction: the newest message of each key stays, and every message without a key stays."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from storage.queue.compacted_log import KEYLESS, TOMBSTONE

TOMBSTONE_KEPT_MS: Final = 86_400_000
"""How long a tombstone stays. A reader that is at most this far behind learns that the key was deleted."""


def survivors(units: NDArray[np.void], now_ms: int) -> NDArray[np.bool_]:
    """Return a mask of the messages that stay, shape (n,).

    `units` (COMPACTED_UNIT) are of one queue, ascending by queue offset. Of the messages with one key the last stays,
    unless it is a tombstone older than TOMBSTONE_KEPT_MS.
    """
    high, low = units["key_high"], units["key_low"]
    order = np.lexsort((low, high))  # stable: by offset within a key
    is_last = np.ones(len(units), np.bool_)
    is_last[:-1] = (high[order][1:] != high[order][:-1]) | (low[order][1:] != low[order][:-1])
    newest = np.empty(len(units), np.bool_)
    newest[order] = is_last
    is_over = (units["flags"] & TOMBSTONE != 0) & (units["store_timestamp"] < now_ms - TOMBSTONE_KEPT_MS)
    keyless = units["flags"] & KEYLESS != 0
    stays: NDArray[np.bool_] = (newest & ~is_over) | keyless
    return stays
