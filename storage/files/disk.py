"""All calls with which the store changes its disk, waits for the disk, or tests whether the disk can be read.

Callers write `disk.flush(descriptor)`, never `from storage.files.disk import flush`. So tests can replace the functions
of this module by a fake disk, which loses all unflushed bytes or fails.

On return, the effect of each call survives

    pwrite_all, a store into a map    the end of the process; not a power cut, not even in order
    flush                             a power cut: the bytes, however they were written, and the file's size
    rename, unlink, make_directory    the end of the process; not a power cut, and each or none of them
    sync_directory                    a power cut: the names in the directory

Stores into a memory map (`map_for_writing`) are not calls of this module: they are the hot path, and they cannot fail
before the flush. If `map_for_writing` returns no map, because of a test or the file system, the writer uses
`pwrite_all`.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import shutil
import sys
from pathlib import Path
from typing import Final

PAGE_BYTES: Final = 4096
"""Page size in bytes for settings that are a number of pages, such as the minimum number of dirty pages for a flush or
a commit."""

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
"""Modes of new directories and files (DIRECTORY_MODE, FILE_MODE): only the owner may read messages."""

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_COPY_BYTES: Final = 1 << 20
_MADV_POPULATE_WRITE: Final = 23
_STATFS_BYTES: Final = 256
_NEVER_MAPPED: Final = {
    0x9123683E: "btrfs",
    0xCA451A4E: "bcachefs",
    0x2FC12FC1: "ZFS",
    0x65735546: "FUSE",
    0x6969: "NFS",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
}
"""File systems on which the store does not write files through a memory map: their names, by magic number (statfs).
They are network file systems, or file systems on which overwriting allocated bytes may need new blocks."""

logger = logging.getLogger(__name__)

Bytes = bytes | bytearray | memoryview


def open_file(path: Path, flags: int) -> int:
    """Open the file `path` and return a descriptor that child processes do not inherit.

    `flags` are flags of `os.open`. Only the owner has access to a new file.
    """
    return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)


def preallocate(descriptor: int, size: int) -> None:
    """Extend the file to `size` bytes with zeros, and allocate all of its blocks. Raises OSError if the disk is
    full."""
    os.posix_fallocate(descriptor, 0, size)


def map_for_writing(descriptor: int, size: int) -> mmap.mmap | None:
    """Return a shared, writable map of a file of `size` bytes. `preallocate` must have been called for this file.

    Returns None if a store into the map could need space that the disk lacks, which would end the process by SIGBUS.
    The file must then be written with `pwrite_all`. Readers of the file see a store into the map at once; `flush`
    writes it to the disk. Raises OSError if the disk is full or failed.
    """
    name = _NEVER_MAPPED.get(_file_system_of(descriptor))
    reason = f"{name} may need new blocks for it" if name else _refusal_to_allocate(descriptor, size)
    if not reason:
        try:
            mapped = mmap.mmap(descriptor, size)
        except (OSError, ValueError) as error:
            reason = str(error)
        else:
            # Turn off read-ahead for this map. Otherwise the first store into a new part of the map would fault in as
            # many pages as the disk reads ahead: megabytes.
            mapped.madvise(mmap.MADV_RANDOM)
            return mapped
    logger.info("the file of descriptor %d is written with pwrite, not through a memory map: %s", descriptor, reason)
    return None


def _file_system_of(descriptor: int) -> int:
    """Return the magic number of the file system that contains the file; 0 if it cannot be determined."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _LIBC.fstatfs(ctypes.c_int(descriptor), buffer):
        return 0
    # The first field of the statfs result is a long; its lower half is the magic number of the file system.
    return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) & 0xFFFFFFFF


def _refusal_to_allocate(descriptor: int, size: int) -> str:
    """Try to allocate a file's blocks in advance. Return the reason why the file system cannot do that; empty if it
    allocated the blocks.

    `posix_fallocate` is not used here, because on file systems without allocation it writes to the file instead. Raises
    OSError if the disk is full.
    """
    if _LIBC.fallocate(ctypes.c_int(descriptor), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
        return ""
    error = ctypes.get_errno()
    if error in (errno.EOPNOTSUPP, errno.ENOSYS):
        return os.strerror(error)
    raise OSError(error, os.strerror(error))


def flush(descriptor: int) -> None:
    """Wait until everything written to the file, by write calls or through memory maps, is on disk.

    After an OSError it is unknown which of these bytes are on disk. Linux marks each page that was changed through any
    map, and `fdatasync` writes all marked pages. So `msync`, which would need a call for each map, is not needed.
    """
    os.fdatasync(descriptor)


def write_again(path: Path, begin: int, end: int) -> None:
    """Write the bytes from `begin` to `end` of the file at `path` once more, and flush the file.

    After a failed flush Linux keeps the bytes in memory, marks them as written, and does not write them at a later
    flush. A process that reads such bytes must write them again itself before it relies on them.
    """
    descriptor = open_file(path, os.O_RDWR)
    try:
        while begin < end:
            data = os.pread(descriptor, min(end - begin, _COPY_BYTES), begin)
            if not data:
                break
            pwrite_all(descriptor, begin, data)
            begin += len(data)
        flush(descriptor)
    finally:
        os.close(descriptor)


def overwrite(path: Path, position: int, data: Bytes) -> None:
    """Overwrite an existing file's bytes with `data`, from byte `position` on. On return the bytes are on disk."""
    descriptor = open_file(path, os.O_RDWR)
    try:
        pwrite_all(descriptor, position, data)
        flush(descriptor)
    finally:
        os.close(descriptor)


def flush_path(path: Path) -> None:
    """Flush the file at `path`, or the names in the directory at `path`. Does nothing if `path` does not exist."""
    if path.is_dir():
        sync_directory(path)
        return
    try:
        descriptor = open_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename `source` to `target` in one step. An existing file `target` is replaced."""
    os.replace(source, target)


def unlink(path: Path) -> None:
    """Remove a file's name from its directory, if it exists."""
    path.unlink(missing_ok=True)


def make_directory(path: Path, *, flush: bool = True) -> None:
    """Create a directory and its parents, if they do not exist. With `flush` each new name is on disk on
    return."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(DIRECTORY_MODE, exist_ok=True)
        if flush:
            sync_directory(directory.parent)


def make_private(path: Path) -> None:
    """Make a directory, and everything in it, accessible to its owner only. Raises PermissionError if another user owns
    it."""
    for directory, _, names in os.walk(path):
        _take_from_others(directory, DIRECTORY_MODE)
        for name in names:
            _take_from_others(f"{directory}/{name}", FILE_MODE)


def _take_from_others(path: str, mode: int) -> None:
    try:
        if os.lstat(path).st_mode & 0o077:
            os.chmod(path, mode)
    except FileNotFoundError:
        pass  # Ignore a file that was removed after the directory was listed.


def remove_tree(path: Path) -> None:
    """Remove a directory and everything in it. Files that cannot be removed are kept, without an error."""
    shutil.rmtree(path, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Wait until the file names in a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: Bytes) -> None:
    """Overwrite the file at `path` so that it contains exactly `data`, and wait until it is on disk.

    A power cut during the write leaves a mixture of old and new sectors (512 bytes).
    """
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        pwrite_all(descriptor, 0, data)
        os.ftruncate(descriptor, len(data))
        flush(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: Bytes) -> None:
    """Replace the file at `path` by a new file with the content `data`; it is on disk on return. A crash leaves the old
    or the new file.

    The new file is written as `path`.new. A crash may leave this file.
    """
    new = path.with_name(f"{path.name}.new")
    write_file(new, data)
    rename(new, path)
    sync_directory(path.parent)


def make_pages(mapped: mmap.mmap, position: int, size: int) -> None:
    """Prefault `size` bytes of a shared, writable map from `position` on, so that they can be written without page
    faults.

    `position` and `size` are multiples of the page size. The file's blocks must be allocated. Raises OSError if
    prefaulting failed, or if the kernel is older than 5.14. `mmap.madvise` is not used: it blocks all other threads.
    """
    # Keep a reference to this ctypes object. While it exists, the map cannot be closed, so the address stays valid
    # during the call of madvise.
    first = ctypes.c_char.from_buffer(mapped, position)
    address = ctypes.addressof(first)
    if _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def pread(descriptor: int, size: int, position: int) -> bytes:
    """Read at most `size` bytes of the file from byte `position` on; empty at the end of the file. Raises OSError if
    the disk failed."""
    return os.pread(descriptor, size, position)


def pwrite_all(descriptor: int, position: int, data: Bytes) -> None:
    """Write all of `data` at byte `position` of the file. Calls `os.pwrite` until everything is written."""
    view = memoryview(data)
    written = os.pwrite(descriptor, view, position)
    while written < len(view):
        written += os.pwrite(descriptor, view[written:], position + written)
