"""A fake disk on which the n-th call of one kind fails. It replaces the functions of `storage.files.disk`."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from storage.files import disk

KINDS = (
    "open_file",
    "preallocate",
    "map_for_writing",
    "pwrite_all",
    "flush",
    "rename",
    "unlink",
    "write_file",
    "sync_directory",
)


class FailingDisk:
    """Counts the disk calls of each kind, and makes calls of `kind` fail.

    The `nth` call (from 0) fails; with `for_good` every later call fails, too. Without `maps` no file can be mapped for
    writing, so that each write is a disk call.
    """

    def __init__(
        self, kind: str = "", nth: int = 0, *, error: int = errno.EIO, for_good: bool = False, maps: bool = True
    ) -> None:
        self.kind, self.nth, self.error, self._for_good = kind, nth, error, for_good
        self._maps = maps
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.failed: list[str] = []
        """Paths (or names of descriptors) of the failed disk calls, in order."""

    @contextmanager
    def installed(self) -> Iterator[FailingDisk]:
        with mock.patch.multiple(disk, **{kind: self._wrap(kind, getattr(disk, kind)) for kind in KINDS}):
            yield self

    def _wrap(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Path | int, *rest: Any) -> Any:
            with self._lock:
                count = self.calls[kind]
                self.calls[kind] += 1
                fails = kind == self.kind and (count == self.nth or (self._for_good and count > self.nth))
                if fails:
                    self.failed.append(os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first))
            if fails:
                raise OSError(self.error, os.strerror(self.error))
            return real(first, *rest) if self._maps or kind != "map_for_writing" else None

        return call
