"""A fake disk that loses unflushed data at a chosen moment. It replaces the functions of `storage.files.disk`.

The disk keeps two states of every file below its directory: the durable state of its last flush, and the state that the
process sees. A power loss mixes both states into the file that the next boot finds. Each 4 KiB page that changed since
the flush is old, new, or torn between its sectors of 512 bytes, independently of other pages. A changed size is old or
new. Each name that was made, moved or removed since its directory was last synced is changed or not, independently of
other names. Sometimes a page is written back early, as a kernel does, so that the page may be neither old nor new.

Real directories (best below /dev/shm) hold the state that the process sees. Nothing is flushed to a real disk.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from storage.files import disk

PAGE_BYTES = 4096
SECTOR_BYTES = 512
REPLACED = ("open_file", "preallocate", "flush", "rename", "unlink", "remove_tree", "sync_directory")
REAL = {name: getattr(disk, name) for name in REPLACED}


@dataclass(eq=False, slots=True)
class _File:
    """The content of a file. It stays the same if the file is renamed.

    `durable`: the file's bytes at its last flush. `seen`: the bytes that the process reads now; set only when the file
    loses its last name.
    """

    durable: bytes = b""
    seen: bytes | None = None


_DIRECTORY = _File()
"""Placeholder for a directory in the map from path names to files."""


@dataclass(slots=True)
class _Change:
    """A change of several file names that takes effect in one step. `names`: the new file of each name, or None if the
    change removes the name. `directories`: the directories that must be synced to make the change durable."""

    names: dict[Path, _File | None]
    directories: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.directories = {name.parent for name in self.names}


class LossyDisk:
    """A disk below `directory` that loses power at one call. The content of `directory` is durable at the start.

    The power fails at the `lose_at`-th disk call (from 0), before or after the call's effect. At that moment the disk
    calls `on_loss`. It then takes the image: the content that the next boot finds. `write_image` writes the image into
    a directory. The process continues as if nothing had happened; later changes are not in the image. With `ends` every
    later call fails instead, because the process ends with the power. `lies`: the name of a directory; a
    flush of its files makes only their sizes durable. Thread-safe.
    """

    def __init__(
        self,
        directory: Path,
        dice: random.Random,
        *,
        lose_at: int = -1,
        on_loss: Callable[[], None],
        ends: bool = False,
        lies: str = "",
    ) -> None:
        self._directory, self._dice = directory, dice
        self._lose_at, self._on_loss = lose_at, on_loss
        self._ends, self._lies = ends, lies
        self._after_effect = dice.random() < 0.5
        self._lock = threading.RLock()
        self._calls = -1
        self._names: dict[Path, _File] = {}
        self._files: dict[int, _File] = {}
        self._changes: list[_Change] = []
        self.image: dict[Path, bytes | None] | None = None
        for path in sorted(directory.rglob("*")):
            if path.is_dir():
                self._names[path] = _DIRECTORY
            else:
                self._names[path] = self._files[path.stat().st_ino] = _File(path.read_bytes())
        self._now = dict(self._names)

    @contextmanager
    def installed(self) -> Iterator[LossyDisk]:
        with mock.patch.multiple(disk, **{name: getattr(self, name) for name in REPLACED}):
            yield self

    @property
    def lost(self) -> bool:
        return self.image is not None

    def lose_after(self, calls: int) -> None:
        """Let the power fail at a later disk call, after `calls` more calls."""
        with self._lock:
            self._lose_at = self._calls + 1 + calls

    def lose_now(self) -> None:
        """Simulate a power failure now, unless the power has already failed."""
        with self._lock:
            if self.image is None:
                self._on_loss()
                self.image = self._take_image()

    def write_image(self, target: Path) -> None:
        """Write the image of the power loss below `target`. The image is the content that the next boot finds."""
        assert self.image is not None
        for path, content in self.image.items():
            copy = target / path.relative_to(self._directory)
            if content is None:
                copy.mkdir()
            else:
                copy.write_bytes(content)

    # Replacements for the functions of storage.files.disk

    def open_file(self, path: Path, flags: int) -> int:
        with self._call():
            new = not path.exists()
            descriptor: int = REAL["open_file"](path, flags)
            if new:
                file = self._files[os.fstat(descriptor).st_ino] = _File()
                self._change({path: file})
            return descriptor

    def preallocate(self, descriptor: int, size: int) -> None:
        with self._call():
            if os.fstat(descriptor).st_size < size:
                os.ftruncate(descriptor, size)

    def flush(self, descriptor: int) -> None:
        with self._call():
            lies = self._lies and f"/{self._lies}/" in os.readlink(f"/proc/self/fd/{descriptor}")
            file, now = self._files[os.fstat(descriptor).st_ino], _content(f"/proc/self/fd/{descriptor}")
            file.durable = file.durable.ljust(len(now), b"\0")[: len(now)] if lies else now

    def rename(self, source: Path, target: Path) -> None:
        with self._call():
            self._forget(target)
            REAL["rename"](source, target)
            self._change({source: None, target: self._now[source]})

    def unlink(self, path: Path) -> None:
        with self._call():
            self._forget(path)
            REAL["unlink"](path)
            if path in self._now:
                self._change({path: None})

    def remove_tree(self, path: Path) -> None:
        with self._call():
            below = [name for name in self._now if path in (name, *name.parents)]
            for name in below:
                self._forget(name)
            REAL["remove_tree"](path)
            for name in below:
                self._change({name: None})

    def sync_directory(self, path: Path) -> None:
        with self._call():
            self._notice_directories(path)
            # A rename, creation or removal of a name becomes durable only together with all earlier changes of the same
            # name.
            names: set[Path] = set()
            durable = []
            for change in reversed(self._changes):
                if path in change.directories or not names.isdisjoint(change.names):
                    durable.append(change)
                    names.update(change.names)
            for change in reversed(durable):
                self._changes.remove(change)
                _apply(self._names, change)

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._lock:
            self._calls += 1
            if self._calls == self._lose_at and not self._after_effect:
                self.lose_now()
            if self.lost and self._ends:
                raise OSError(errno.EIO, "the power has failed")
            yield
            if self._calls == self._lose_at:
                self.lose_now()
            elif self._dice.random() < 0.1:
                self._write_back()

    def _change(self, names: dict[Path, _File | None]) -> None:
        change = _Change(names)
        self._changes.append(change)
        _apply(self._now, change)

    def _forget(self, path: Path) -> None:
        """Remove the file at `path` from the current state of the simulated disk. After a power loss the directory may
        still contain the file."""
        file = self._now.get(path)
        if file is not None and file is not _DIRECTORY:
            file.seen = _content(path)
            del self._files[path.stat().st_ino]

    def _notice_directories(self, directory: Path) -> None:
        if directory.is_dir():
            for entry in os.scandir(directory):
                if entry.is_dir() and Path(entry.path) not in self._now:
                    self._change({Path(entry.path): _DIRECTORY})

    def _seen(self) -> dict[int, bytes]:
        """Return the bytes of every file as the process sees them, by the id of the `_File` object."""
        return {id(file): _content(path) for path, file in self._now.items() if file is not _DIRECTORY}

    def _write_back(self) -> None:
        path = self._dice.choice([path for path, file in self._now.items() if file is not _DIRECTORY] or [None])
        if path is not None:
            seen, file = _content(path), self._now[path]
            if len(seen) == len(file.durable):
                file.durable = self._mix(file.durable, seen, 0.3)

    def _take_image(self) -> dict[Path, bytes | None]:
        for path in [self._directory, *(path for path, file in self._now.items() if file is _DIRECTORY)]:
            self._notice_directories(path)
        seen = self._seen()
        dice, names = self._dice, dict(self._names)
        likely = dice.choice((0.0, 0.5, 0.9, 1.0))
        for change in self._changes:
            if dice.random() < likely:
                _apply(names, change)
        likely = dice.choice((0.0, 0.2, 0.5, 0.8, 1.0))
        image: dict[Path, bytes | None] = {}
        for path, file in sorted(names.items()):
            if path.parent != self._directory and path.parent not in image:
                # The power cut removed the directory that contains this path, so the image of the disk contains nothing
                # below it.
                continue
            if file is _DIRECTORY:
                image[path] = None
            else:
                now = file.seen if file.seen is not None else seen[id(file)]
                image[path] = self._mix(file.durable, now, likely)
        return image

    def _mix(self, old: bytes, new: bytes, likely: float) -> bytes:
        """Return a mixture of the pages of `old` and `new`. A changed page is taken from `new` with the probability
        `likely`."""
        if old == new:
            return old
        dice = self._dice
        size = len(old) if len(old) != len(new) and dice.random() >= likely else len(new)
        old, new = old.ljust(size, b"\0")[:size], new.ljust(size, b"\0")[:size]
        result = bytearray(old)
        for page in range(0, size, PAGE_BYTES):
            end = min(page + PAGE_BYTES, size)
            if old[page:end] == new[page:end]:
                continue
            if dice.random() < 0.3:
                for sector in range(page, end, SECTOR_BYTES):
                    if dice.random() < 0.5:
                        result[sector : sector + SECTOR_BYTES] = new[sector : min(sector + SECTOR_BYTES, end)]
            elif dice.random() < likely:
                result[page:end] = new[page:end]
        return bytes(result)


def _apply(names: dict[Path, _File], change: _Change) -> None:
    for path, file in change.names.items():
        if file is None:
            names.pop(path, None)
        else:
            names[path] = file


def _content(path: Path | str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


class LossyDisks:
    """Several fake disks in one process. Each disk call goes to the disk whose directory contains the file; calls for
    other files go to the real disk."""

    def __init__(self) -> None:
        self._disks: dict[str, LossyDisk] = {}

    def add(self, directory: Path, dice: random.Random, **options: Any) -> LossyDisk:
        """Add a disk below `directory`. `options`: further arguments of LossyDisk."""
        added = self._disks[f"{directory}/"] = LossyDisk(directory, dice, **options)
        return added

    @contextmanager
    def installed(self) -> Iterator[LossyDisks]:
        with mock.patch.multiple(disk, **{name: partial(self._call, name) for name in REPLACED}):
            yield self

    def _call(self, name: str, file: Path | int, *arguments: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else f"{file}/"
        method = next((getattr(one, name) for root, one in self._disks.items() if path.startswith(root)), REAL[name])
        return method(file, *arguments)
