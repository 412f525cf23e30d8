"""UnfinishedOffsets tracks the unfinished messages of a queue whose messages are finished one by one. It computes the
offset to commit.

The offset to commit is the smallest unfinished offset (spec/messaging.md §5.5). So one slow message delays only the
commit, not the processing of later messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence


class UnfinishedOffsets:
    """The offsets of messages of one queue that were fetched but are not finished. Offsets are added in ascending
    order."""

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
        """Mark messages as finished, and return the offset to commit. It is the smallest unfinished offset, or the
        offset after the last message if all are finished. Returns -1 if no message was unfinished before."""
        if not self._left:
            return -1
        self._left.difference_update(offsets)
        return self.first

    @property
    def first(self) -> int:
        """The smallest unfinished offset. If all messages are finished, the offset after the last message; -1 if no
        message was ever added."""
        order, left = self._order, self._left
        while order and order[0] not in left:
            order.popleft()
        return order[0] if order else self._next

    @property
    def span(self) -> int:
        """Number of offsets from the first unfinished message to the last fetched message; 0 if all messages are
        finished."""
        return self._order[-1] - self.first if self._left else 0
