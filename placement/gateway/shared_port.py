"""Keeps gateways of two clusters on one machine from sharing a port.

Several gateway processes of a node listen at one port (SO_REUSEPORT), and the kernel shares connections among them. The
kernel would also let a second cluster of the same user join. Then half of the clients would send to the wrong cluster.
So each process holds a shared lock on a file whose text names its cluster.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from raymq.common.errors import ConfigError

CLAIM_TIMEOUT_S: Final = 10.0
"""Time in seconds that a process waits for a port that another cluster uses. That cluster may be stopping."""
CLAIM_INTERVAL_S: Final = 0.1


@contextmanager
def shared_port(port: int, owner: str, folder: Path, timeout_s: float = CLAIM_TIMEOUT_S) -> Iterator[None]:
    """Hold the port `port` of this machine for the processes of `owner`. `folder`: the directory of the lock's file.

    Raises ConfigError if processes of another owner hold the port for longer than `timeout_s`, or if the file cannot be
    opened. The end of the process releases the port, too. The last process that releases the port deletes the file; a
    process that is killed leaves it.
    """
    file = folder / f"raymq-gateway-{os.getuid()}-{port}"
    deadline_s = time.monotonic() + timeout_s
    while (descriptor := _claimed(file, owner.encode())) is None:
        if time.monotonic() > deadline_s:
            raise ConfigError(
                f"port {port} belongs to the gateway of another raymq on this machine: set gateway.port to another "
                "port, or stop that gateway (raymq gateway stop)"
            )
        time.sleep(CLAIM_INTERVAL_S)
    try:
        yield
    finally:
        # without another holder, nobody needs the file
        if _locked(descriptor, fcntl.LOCK_EX) and _is_at(descriptor, file):
            file.unlink()
        os.close(descriptor)


def _claimed(file: Path, owner: bytes) -> int | None:
    """Try to get a shared lock on the file, with `owner` as its text. Without a holder, the text is written first.
    Returns the open file; None if another owner holds it, or if another process deletes it now."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot reserve the gateway's port with the file {file}: {error}") from None
    try:
        if _locked(descriptor, fcntl.LOCK_EX):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, owner, 0)
        # The kernel may give the file to another process between the two locks. So the text is read under the second
        # lock.
        if (
            _locked(descriptor, fcntl.LOCK_SH)
            and os.pread(descriptor, len(owner) + 1, 0) == owner
            and _is_at(descriptor, file)
        ):
            found, descriptor = descriptor, -1
            return found
        return None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _is_at(descriptor: int, file: Path) -> bool:
    """Return whether an open file is still the file at its path: another process may have deleted it."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
