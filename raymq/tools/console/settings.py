"""The settings of the console's application."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

DEFAULT_TAIL_RATE: Final = 50


def no_secret(given: str) -> str:
    """The check of a console without secrets that can be guessed: "", which is no role."""
    return ""


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """The rights of those who log in, and a few bounds.

    `is_admin` tells if a text is the admins' token, in constant time (raymq.tools.console.security.tokens makes it);
    `viewer_token` is that of people who only look, None for nobody. `guarded` returns the name of the role that a text
    gives which can be guessed, and bounds the guesses (raymq.tools.console.security.tokens.GuardedCheck).
    `open_to_all`: the cluster has no tokens, and everybody who reaches the console is an admin; whoever starts it so
    binds it to loopback.

    `base_path` is "" or begins with a slash and does not end with one. `secure`: cookies are for TLS only.
    `show_bodies`: viewers see messages' bodies. `read_only`: nobody changes anything. `tail_rate` messages a second at
    most go to the `max_viewers` of live tails. A page refreshes its figures every `refresh_s`, one
    with a long list half as often.
    """

    is_admin: Callable[[str], bool]
    viewer_token: str | None = None
    guarded: Callable[[str], str] = no_secret
    open_to_all: bool = False
    base_path: str = ""
    secure: bool = False
    show_bodies: bool = True
    read_only: bool = False
    tail_rate: int = DEFAULT_TAIL_RATE
    max_viewers: int = 20
    refresh_s: float = 5.0
