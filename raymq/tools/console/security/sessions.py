"""Users of the console, their roles and their sessions. Sessions are kept in memory only, so all users must log in
again after a restart of the console.

No I/O and no clock: callers pass the time. Only the application's event loop calls this module.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final


class Role(StrEnum):
    """The role of a console user. An admin may make changes; a viewer may only read."""

    ADMIN = "admin"
    VIEWER = "viewer"


@dataclass(frozen=True, slots=True)
class ConsoleUser:
    """A logged-in user of the console.

    `name`: the name that the user entered at login. The audit log shows this name. The name proves nothing, because
    several users may share a token. `session`: the id of the user's session. A script that sends its token with each
    request has no session, and `session` is "".
    """

    name: str
    role: Role
    address: str
    session: str = ""

    @property
    def is_admin(self) -> bool:
        """True if the console user is an admin, who may make changes."""
        return self.role is Role.ADMIN


SESSION_LIFE_S: Final = 12 * 3600.0
SESSIONS_MAX: Final = 1_000
"""Maximum number of sessions of console users in memory. A further login ends the oldest session."""
NOTICES_MAX: Final = 5


@dataclass(slots=True)
class Notice:
    """A sentence that the console shows on the user's next page. `kind` is "done" or "failed"."""

    kind: str
    text: str


@dataclass(slots=True)
class Session:
    """A console user's session. It expires at the time `ends_s`. `notices` are shown on the user's next page."""

    user: ConsoleUser
    ends_s: float
    notices: list[Notice] = field(default_factory=list)


class Sessions:
    """The sessions of all console users, by random session id."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def begin(self, name: str, role: Role, address: str, now_s: float) -> Session:
        """Create a session of a console user, with an id that cannot be guessed."""
        session_id = secrets.token_urlsafe(32)
        session = Session(ConsoleUser(name, role, address, session_id), now_s + SESSION_LIFE_S)
        self._sessions[session_id] = session
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return session

    def find(self, session_id: str, now_s: float) -> Session | None:
        """Return the session with this id; None if it does not exist or has expired."""
        session = self._sessions.get(session_id)
        if session is not None and now_s >= session.ends_s:
            del self._sessions[session_id]
            return None
        return session

    def end(self, session_id: str) -> None:
        """End the session with this id, if it exists."""
        self._sessions.pop(session_id, None)
