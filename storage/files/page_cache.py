"""Reads a file once without changing which of its pages the page cache holds.

A pass over a whole store must not push the pages that consumers read out of memory. So before a range is read, mincore
shows which of its pages are in the page cache. After the read, only the other pages are dropped (posix_fadvise). A page
that was in memory before stays there. Linux does not drop a page that is dirty, or that any process has mapped.

The range is read with `pread` before the caller reads it through a memory map. So a sector that the disk cannot read is
an OSError with a file name, not a SIGBUS that ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from storage.files import disk

READ_BYTES: Final = 256 << 10
"""Number of bytes that are read from the disk in one call."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_MADV_DONTNEED: Final = 4

MappedBytes = memoryview | NDArray[np.uint8]


@contextmanager
def passing_read(
    path: Path, begin: int, end: int, *, reach: int = 0, mapped: Callable[[], MappedBytes] | None = None
) -> Iterator[None]:
    """Load the bytes from `begin` to `end` of the file at `path` into the page cache, for the body of a `with`
    statement. Afterwards drop the pages that were not in the page cache before.

    `reach`: number of bytes after `end` that the body may read, too. `mapped`: returns the bytes of the whole file over
    the memory map through which the body reads them. The map stays valid. Raises FileNotFoundError if the file does not
    exist, OSError if the disk cannot read the range.
    """
    descriptor = disk.open_file(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        first = max(begin - begin % mmap.PAGESIZE, 0)
        before = resident_pages(descriptor, first, min(end + reach, size))
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        try:
            _load(descriptor, begin, min(end, size))
            yield
        finally:
            _drop_others(descriptor, first, before, mapped)
    finally:
        os.close(descriptor)


def resident_pages(descriptor: int, begin: int, end: int) -> NDArray[np.bool_]:
    """Return a mask of the pages of a file from byte `begin`, a multiple of the page size, to byte `end`: True for each
    page in the page cache. If the kernel does not report that, each page counts as in the page cache."""
    pages = -(-max(end - begin, 0) // mmap.PAGESIZE)
    if not pages:
        return np.empty(0, np.bool_)
    found = np.ones(pages, np.uint8)
    # A new memory map has no pages of its own. So mincore looks into the page cache, and the map loads nothing.
    window = mmap.mmap(descriptor, end - begin, prot=mmap.PROT_READ, offset=begin)
    try:
        view = np.frombuffer(window, np.uint8)
        address, result = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(found.ctypes.data)
        if _LIBC.mincore(address, ctypes.c_size_t(end - begin), result):
            found[:] = 1
        del view
    finally:
        window.close()
    mask: NDArray[np.bool_] = (found & 1).astype(np.bool_)
    return mask


def _load(descriptor: int, begin: int, end: int) -> None:
    while begin < end:
        read = len(disk.pread(descriptor, min(end - begin, READ_BYTES), begin))
        if not read:
            return
        begin += read


def _drop_others(
    descriptor: int, first: int, before: NDArray[np.bool_], mapped: Callable[[], MappedBytes] | None
) -> None:
    """Drop the pages from byte `first` on that are not in the mask `before` of the page cache's earlier pages."""
    edges = np.flatnonzero(np.diff(np.concatenate(([True], before, [True])).astype(np.int8))).tolist()
    if not edges:
        return
    view = None if mapped is None else np.frombuffer(mapped(), np.uint8)
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        begin, size = first + start * mmap.PAGESIZE, (stop - start) * mmap.PAGESIZE
        if view is not None:
            # Linux keeps pages that are mapped. The next reader of this part of the map finds the page again, in the
            # page cache or on the disk.
            _LIBC.madvise(ctypes.c_void_p(view.ctypes.data + begin), ctypes.c_size_t(size), _MADV_DONTNEED)
        os.posix_fadvise(descriptor, begin, size, os.POSIX_FADV_DONTNEED)
