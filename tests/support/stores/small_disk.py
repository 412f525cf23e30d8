"""A real disk of a few MiB (tmpfs), which a test can fill completely."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

BALLAST = "ballast"
_STEPS = (1 << 20, 1 << 12)


class SmallDisk:
    """A mounted tmpfs of a fixed size. `path`: the directory at which it is mounted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self, share: float) -> None:
        """Write a file until the share `share` of the disk is in use. With 1.0, write until the disk is full."""
        with (self.path / BALLAST).open("ab", buffering=0) as ballast:
            for step in _STEPS:
                while True:
                    found = os.statvfs(self.path)
                    used = (found.f_blocks - found.f_bfree) * found.f_frsize + step
                    if used > share * found.f_blocks * found.f_frsize:
                        break
                    try:
                        ballast.write(b"x" * step)
                    except OSError as error:
                        if error.errno != errno.ENOSPC:
                            raise
                        break

    @property
    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def make_room(self) -> None:
        """Delete the file with which `fill` filled the disk."""
        (self.path / BALLAST).unlink(missing_ok=True)


@contextmanager
def small_disk(path: Path, size_mib: int) -> Iterator[SmallDisk]:
    """Mount a tmpfs of `size_mib` MiB at `path`, which is created. If this process has no right to mount, the test is
    skipped; in CI as root, the test fails."""
    path.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=0700", "tmpfs", str(path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if done.returncode:
        reason = f"a tmpfs cannot be mounted here, which root can: {done.stderr.strip()}"
        if os.environ.get("CI") and os.getuid() == 0:
            pytest.fail(reason)
        pytest.skip(reason)
    try:
        yield SmallDisk(path)
    finally:
        # Unmount lazily: a process that is ending may still have a file open.
        subprocess.run(["umount", "--lazy", str(path)], timeout=30, check=True)
