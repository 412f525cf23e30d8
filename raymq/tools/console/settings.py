"""ConsoleSettings: the settings of the web console's application."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

DEFAULT_TAIL_RATE: Final = 50


def no_secret(given: str) -> str:
    """Default check of a secret, for a console without secrets: return "", because no given secret grants a
    role."""
    return ""


@dataclass(frozen=True, slots=True)
class ConsoleSettings:
    """Settings of the console's application: the rights of users, and some limits.

    `is_admin` checks in constant time whether a text is the admins' token (raymq.tools.console.security.tokens creates
    this function). `viewer_token` is the token of users who may only read; None if there are no viewers. `guarded`
    checks secrets that can be guessed: it returns the name of the role that a text gives, and limits the number of
    guesses (raymq.tools.console.security.tokens.GuardedCheck). `open_to_all`: the cluster has no tokens, and everybody
    who can connect to the console is an admin. The program that starts such a console must bind it to loopback.

    `base_path` is "" or begins with a slash and does not end with one. `secure`: if true, cookies are sent over TLS
    only. `show_bodies`: if true, viewers see message bodies. `read_only`: if true, no user may change anything.
    `tail_rate` is the maximum number of messages per second of a live tail, `max_viewers` the maximum number of viewers
    of all live tails. A page refreshes itself every `refresh_s` seconds, a page with a long list half as often.
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
