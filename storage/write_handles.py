"""Files open for writing, a bounded number of them: a store may have more queues than descriptors."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path

from storage import disk


class WriteHandles:
    """Descriptors by path, the least recently used closed beyond `max_open`. For one thread at a time."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._descriptors: OrderedDict[Path, int] = OrderedDict()

    def write(self, path: Path, position: int, data: disk.Bytes) -> None:
        """Write all of `data` at byte `position` of the existing file `path`."""
        descriptor = self._descriptors.get(path)
        if descriptor is None:
            descriptor = disk.open_file(path, os.O_WRONLY)
            self._descriptors[path] = descriptor
            if len(self._descriptors) > self._max_open:
                os.close(self._descriptors.popitem(last=False)[1])
        else:
            self._descriptors.move_to_end(path)
        disk.pwrite_all(descriptor, position, data)

    def forget(self, path: Path) -> None:
        """Close `path`, which is about to be deleted."""
        descriptor = self._descriptors.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Close everything."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
