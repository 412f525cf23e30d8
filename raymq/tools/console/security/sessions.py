"""Users of the console, their roles and sessions; in memory, so that a restart of the console asks everybody to log
in.

Pure: the time comes in. Called from the application's one event loop.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Role(StrEnum):
    """An admin may change things; a viewer only looks."""

    ADMIN = "admin"
    VIEWER = "viewer"


@dataclass(frozen=True, slots=True)
class ConsoleUser:
    """Somebody who is logged in. `name` is what they called themselves, for the audit; a token is shared, so it is no
    proof. `session` is the id of their session, "" for a script that sends its token with each request."""

    name: str
    role: Role
    address: str
    session: str = ""

    @property
    def is_admin(self) -> bool:
        """True for those who may change things."""
        return self.role is Role.ADMIN


SESSION_LIFE_S: Final = 12 * 3600.0
SESSIONS_MAX: Final = 1_000
"""The oldest session ends when there would be more."""
NOTICES_MAX: Final = 5


@dataclass(slots=True)
class Notice:
    """A sentence that the next page shows. `kind` is "done" or "failed"."""

    kind: str
    text: str


@dataclass(slots=True)
class Session:
    """Somebody's session, until `ends_s`, with the notices that their next page shows."""

    user: ConsoleUser
    ends_s: float
    notices: list[Notice] = field(default_factory=list)


class Sessions:
    """The sessions by their random ids."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def begin(self, name: str, role: Role, address: str, now_s: float) -> Session:
        """A new session, with an id that nobody can guess."""
        session_id = secrets.token_urlsafe(32)
        session = Session(ConsoleUser(name, role, address, session_id), now_s + SESSION_LIFE_S)
        self._sessions[session_id] = session
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return session

    def find(self, session_id: str, now_s: float) -> Session | None:
        """The session with this id, None if it ended or never was."""
        session = self._sessions.get(session_id)
        if session is not None and now_s >= session.ends_s:
            del self._sessions[session_id]
            return None
        return session

    def end(self, session_id: str) -> None:
        """End a session, if it is there."""
        self._sessions.pop(session_id, None)
