"""Users of the console, and their roles."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """An admin may change things; a viewer only looks."""

    ADMIN = "admin"
    VIEWER = "viewer"


@dataclass(frozen=True, slots=True)
class User:
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
