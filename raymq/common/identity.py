"""The user in whose name this process calls raymq's actors. A process has at most one user at a time.

Lane calls (calls over raymq's own socket connections, raymq.remoting.lane) and signed calls of actor methods
(raymq.remoting.actor_ref) are made in the name of this user. The user belongs to the process, not to a client, because
clients share threads, lanes and broker clients. A reused process, such as a worker of Ray or Spark, releases the user
at the end of its task (`acting_as`). Without access control no user exists. The user and its key exist only in the
process's memory, and the key is never printed.
"""

from __future__ import annotations

import hmac
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from raymq.common.errors import ClientStateError

SIGNED: Final = "signed_"
"""Prefix of the names of signed actor methods. Each public actor method has a signed variant, whose arguments are a
signature and the pickled arguments."""
USER_NAME_MAX_BYTES: Final = 127
"""Maximum length of a user's name, in bytes of UTF-8. The handshake of a lane (direct socket connection) has no space
for more."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A user's name, and the key that signs requests in the user's name."""

    user: str
    key: bytes = field(repr=False)


class _Holder:
    """The identity (user) of this process, and the number of its current uses: the calls of `take` minus the calls of
    `give_back`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.identity: Identity | None = None
        self.count = 0


_holder: Final = _Holder()
os.register_at_fork(after_in_child=_holder.__init__)  # type: ignore[misc]  # a child acts as nobody until it connects


def present() -> Identity | None:
    """Return the user in whose name this process acts, or None if there is no such user."""
    return _holder.identity


def take(identity: Identity) -> None:
    """Let this process act as a user until `give_back`. Each `take` needs one `give_back`.

    Raises ClientStateError, and changes nothing, if this process already acts as another user, or as the same user with
    another key.
    """
    with _holder.lock:
        known = _holder.identity
        if known is not None and not _same(known, identity):
            other = f"acts as {identity.user!r}" if identity.user != known.user else "uses another secret"
            has = "" if identity.user != known.user else " with another secret"
            raise ClientStateError(
                f"this process acts as user {known.user!r}{has}: close all clients of this process before it "
                f"{other}, or use another process"
            )
        _holder.identity = identity
        _holder.count += 1


def give_back(identity: Identity) -> None:
    """Undo one earlier call of `take` for this user. After the last `give_back`, the process no longer acts as
    a user."""
    with _holder.lock:
        known = _holder.identity
        if known is None or not _same(known, identity):
            # the process no longer acts as the user `identity`, because it is a forked child or a test replaced the
            # user
            return
        _holder.count -= 1
        if _holder.count <= 0:
            _holder.identity, _holder.count = None, 0


@contextmanager
def acting_as(identity: Identity | None) -> Iterator[None]:
    """Act as a user within a `with` block. If `identity` is None, the process's user does not change."""
    if identity is None:
        yield
        return
    take(identity)
    try:
        yield
    finally:
        give_back(identity)


def _same(one: Identity, other: Identity) -> bool:
    return one.user == other.user and hmac.compare_digest(one.key, other.key)
