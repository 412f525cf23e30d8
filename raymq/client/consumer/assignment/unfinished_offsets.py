"""UnfinishedOffsets is the account of one queue's messages that are finished one by one: it says what may be committed.

The offset to commit is the smallest that is not finished (spec/messaging.md §5.5), so one slow message holds the commit
point and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence


class UnfinishedOffsets:
    """The offsets of messages that were fetched and are not finished. They are added in ascending order."""

    def __init__(self) -> None:
        self._left: set[int] = set()
        self._order: deque[int] = deque()
        self._next = -1

    def __len__(self) -> int:
        return len(self._left)

    def add(self, offsets: Sequence[int]) -> None:
        self._left.update(offsets)
        self._order.extend(offsets)
        self._next = offsets[-1] + 1

    def remove(self, offsets: Collection[int]) -> int:
        """Finish messages, and return the offset to commit: the smallest unfinished one, or the offset after the last
        message if none is unfinished. Returns -1 if no message was unfinished before."""
        if not self._left:
            return -1
        self._left.difference_update(offsets)
        return self.first

    @property
    def first(self) -> int:
        """The smallest unfinished offset; the offset after the last message if all are finished; -1 if there never was
        a message."""
        order, left = self._order, self._left
        while order and order[0] not in left:
            order.popleft()
        return order[0] if order else self._next

    @property
    def span(self) -> int:
        """The distance in offsets from the first unfinished message to the last fetched one; 0 if all are finished."""
        return self._order[-1] - self.first if self._left else 0
