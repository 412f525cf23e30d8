"""The user that this process acts as: one at a time, for all of its calls to raymq's actors.

A call over a lane is made in the name of this user (raymq.remoting.lane), and so is each call of an actor's method
(raymq.remoting.actor_ref), which is signed. It is the process's and not a client's,
because threads, lanes and clients of brokers are shared in it. A process that is used anew, as Ray's and Spark's
workers are, gives the user back at the end of its task (`acting_as`). Where nobody asks for users there is none.
Nothing survives the process; the key is never printed.
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
"""The beginning of the name of an actor method's twin for signed calls."""
USER_NAME_MAX_BYTES: Final = 127
"""The longest name of a user that a lane's handshake carries, as UTF-8."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A user by name, and the key that signs in its name."""

    user: str
    key: bytes = field(repr=False)


class _Holder:
    """The identity of this process, and the number of those who hold it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.identity: Identity | None = None
        self.count = 0


_holder: Final = _Holder()
os.register_at_fork(after_in_child=_holder.__init__)  # type: ignore[misc]  # a child acts as nobody until it connects


def present() -> Identity | None:
    """The user that this process acts as; None if it names none."""
    return _holder.identity


def take(identity: Identity) -> None:
    """Act as a user until `give_back`, which is called once for each `take`.

    ClientStateError, with nothing changed, while this process acts as another user, or as this one with another key.
    """
    with _holder.lock:
        known = _holder.identity
        if known is not None and not _same(known, identity):
            other = f"acts as {identity.user!r}" if identity.user != known.user else "uses the other secret"
            has = "" if identity.user != known.user else " with another secret"
            raise ClientStateError(
                f"this process acts as user {known.user!r}{has}: close its clients before it {other}, or use another "
                "process"
            )
        _holder.identity = identity
        _holder.count += 1


def give_back(identity: Identity) -> None:
    """End one `take` of this user; after the last one the process acts as nobody."""
    with _holder.lock:
        known = _holder.identity
        if known is None or not _same(known, identity):
            return  # a fork of the process, or a test, has another one
        _holder.count -= 1
        if _holder.count <= 0:
            _holder.identity, _holder.count = None, 0


@contextmanager
def acting_as(identity: Identity | None) -> Iterator[None]:
    """Act as a user for the length of a `with`; as whoever the process acts as anyway if it is None."""
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
