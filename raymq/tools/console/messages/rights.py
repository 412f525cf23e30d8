"""Rights to see messages' bodies: an admin's always, a viewer's only with `show_bodies`."""

from __future__ import annotations

from raymq.common.errors import NoPermissionError
from raymq.tools.console.security.users import User
from raymq.tools.console.settings import ConsoleSettings


def bodies_shown(user: User, settings: ConsoleSettings) -> bool:
    """True if this user may see bodies."""
    return user.is_admin or settings.show_bodies


def check_text_search(contains: str, *, with_body: bool) -> None:
    """Refuse a search in bodies to those who may not see them: what is found tells what is there. NoPermissionError."""
    if contains and not with_body:
        raise NoPermissionError("viewers cannot search in bodies that are hidden from them (console.show_bodies)")
