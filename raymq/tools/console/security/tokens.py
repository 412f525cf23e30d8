"""Tokens: that of the admins is Ray's own, that of the viewers is in a file of theirs.

A token of LONG_TOKEN_CHARACTERS or more cannot be guessed, so it is compared at once, however many wrong tokens came
before. What a person may have chosen, such as the super user's secret, is behind a GuardedCheck, which bounds guesses.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from raymq.common.errors import ConfigError, SystemBusyError
from raymq.tools.console.security.sessions import Role
from raymq.tools.console.settings import no_secret

LONG_TOKEN_CHARACTERS: Final = 32
"""A random token of so many hexadecimal digits has 128 bits."""
WRONG_SECRETS_MAX: Final = 20
WRONG_SECRETS_S: Final = 30.0


def read_token(path: Path) -> str:
    """The token in a file, without the white space around it. ConfigError if there is none."""
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"the token in {path} cannot be read: {error.strerror or error}") from None
    if not token:
        raise ConfigError(f"{path} holds no token; put one there, for example with `openssl rand -hex 32`")
    return token


def same_token(given: str, wanted: str) -> bool:
    """True if both are the same text; takes as long for a wrong one that begins right."""
    return hmac.compare_digest(given.encode(), wanted.encode())


def ray_token_check(token_file: Path | None = None) -> Callable[[str], bool]:
    """A function that tells if a text is the cluster's token, as Ray itself checks it.

    Ray has no public function for that. Where its own one has moved, the text is compared with the token in
    `token_file`; without a file nobody is an admin then.
    """
    try:
        from ray._private.authentication.authentication_utils import validate_request_token
    except ImportError:
        validate_request_token = None

    def is_ray_token(given: str) -> bool:
        if not given or not given.isascii() or not given.isprintable():
            return False
        if validate_request_token is not None:
            return bool(validate_request_token(f"Bearer {given}"))
        return token_file is not None and same_token(given, read_token(token_file))

    return is_ray_token


class GuardedCheck:
    """A check of secrets that can be guessed, which bounds the guesses of everybody together.

    `check` returns the name of the role that a secret gives, "" for a wrong one. After WRONG_SECRETS_MAX wrong secrets
    within WRONG_SECRETS_S, a secret that has not been right before is not looked at: SystemBusyError says for how long.
    A secret that has been right once is always taken, at once. Called from the application's one event loop.
    """

    def __init__(self, check: Callable[[str], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._check, self._clock = check, clock
        self._key = secrets.token_bytes(32)
        self._right: dict[bytes, str] = {}
        """The roles of right secrets, by their keyed digests: as many as there are secrets."""
        self._wrong_s: deque[float] = deque(maxlen=WRONG_SECRETS_MAX)

    def __call__(self, given: str) -> str:
        """The name of the role that a secret gives, "" if it is wrong. SystemBusyError if it was not looked at."""
        digest = hmac.digest(self._key, given.encode(), "sha256")
        known, now_s = self._right.get(digest), self._clock()
        if known is not None:
            return known
        left_s = self._wrong_s[0] + WRONG_SECRETS_S - now_s if len(self._wrong_s) == WRONG_SECRETS_MAX else 0.0
        if left_s > 0:
            raise SystemBusyError(f"Too many wrong secrets came: wait {left_s:.0f} s, or use Ray's token.")
        role = self._check(given)
        if role:
            self._right[digest] = role
        else:
            self._wrong_s.append(now_s)
        return role


def role_of_token(
    given: str,
    is_admin: Callable[[str], bool],
    viewer_token: str | None,
    guarded: Callable[[str], str] = no_secret,
) -> Role | None:
    """The role that a token gives, None if it is wrong. SystemBusyError from `guarded`, which is asked last."""
    if is_admin(given):
        return Role.ADMIN
    if viewer_token is not None and same_token(given, viewer_token):
        return Role.VIEWER
    role = guarded(given)
    return Role(role) if role else None
