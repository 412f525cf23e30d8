"""A disk that loses, at a moment of your choice, what was never flushed: it stands in for `storage.files.disk`.

It keeps two things of every file below its directory: what is on the disk for sure (as of its last flush), and what the
process sees. At a power loss the file that the next boot finds is made of both: each 4 KiB page that changed since is
old, new, or torn between its sectors of 512 bytes, whatever happened to its neighbours; a size that changed is old or
new. Each name that was made, moved or removed since its directory was last synced is so or is not, whatever happened
to the others. Now and then a page is written back early, as a kernel does, so that it may be neither old nor new.

Real directories (best below /dev/shm) hold what the process sees; nothing is ever really flushed.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from storage.files import disk

PAGE_BYTES = 4096
SECTOR_BYTES = 512
REPLACED = ("open_file", "preallocate", "flush", "rename", "unlink", "remove_tree", "sync_directory")


@dataclass(eq=False, slots=True)
class _File:
    """A file, whatever its name. `seen` is set once it has none, and can be looked up no more."""

    durable: bytes = b""
    seen: bytes | None = None


_DIRECTORY = _File()
"""Stands for any directory among the files that names stand for."""


@dataclass(slots=True)
class _Change:
    """Names that change in one step: to a file, or to None. `directories` are those whose sync makes it durable."""

    names: dict[Path, _File | None]
    directories: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.directories = {name.parent for name in self.names}


class LossyDisk:
    """The disk below `directory`, whose content is durable at the start.

    The `lose_at`-th call (from 0) loses the power, before or after its effect: `on_loss` is called, then the image is
    taken, which `write_image` puts into a directory. The process goes on as if nothing had happened; what it does from
    then on is not in the image. Thread-safe.
    """

    def __init__(self, directory: Path, dice: random.Random, *, lose_at: int, on_loss: Callable[[], None]) -> None:
        self._directory, self._dice = directory, dice
        self._lose_at, self._on_loss = lose_at, on_loss
        self._after_effect = dice.random() < 0.5
        self._lock = threading.RLock()
        self._real = {name: getattr(disk, name) for name in REPLACED}
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

    def lose_now(self) -> None:
        """Lose the power now, unless it is lost already."""
        with self._lock:
            if self.image is None:
                self._on_loss()
                self.image = self._take_image()

    def write_image(self, target: Path) -> None:
        """Write what the next boot finds below `target`."""
        assert self.image is not None
        for path, content in self.image.items():
            copy = target / path.relative_to(self._directory)
            if content is None:
                copy.mkdir()
            else:
                copy.write_bytes(content)

    # What stands in for the functions of storage.files.disk.

    def open_file(self, path: Path, flags: int) -> int:
        with self._call():
            new = not path.exists()
            descriptor: int = self._real["open_file"](path, flags)
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
            self._files[os.fstat(descriptor).st_ino].durable = _content(f"/proc/self/fd/{descriptor}")

    def rename(self, source: Path, target: Path) -> None:
        with self._call():
            self._forget(target)
            self._real["rename"](source, target)
            self._change({source: None, target: self._now[source]})

    def unlink(self, path: Path) -> None:
        with self._call():
            self._forget(path)
            self._real["unlink"](path)
            if path in self._now:
                self._change({path: None})

    def remove_tree(self, path: Path) -> None:
        with self._call():
            below = [name for name in self._now if path in (name, *name.parents)]
            for name in below:
                self._forget(name)
            self._real["remove_tree"](path)
            for name in below:
                self._change({name: None})

    def sync_directory(self, path: Path) -> None:
        with self._call():
            self._notice_directories(path)
            # A change is on disk no sooner than those before it of the same names.
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
        """The file at `path` loses its name: a durable name may still lead to it."""
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
        """The bytes of every file as the process sees them, by the file's identity."""
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
                continue  # its directory is not there
            if file is _DIRECTORY:
                image[path] = None
            else:
                now = file.seen if file.seen is not None else seen[id(file)]
                image[path] = self._mix(file.durable, now, likely)
        return image

    def _mix(self, old: bytes, new: bytes, likely: float) -> bytes:
        """A file between `old` and `new`, each page of which is new with the likelihood given."""
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
