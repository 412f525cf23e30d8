"""Tokens of the console. Admins use Ray's own token; viewers use a token from a separate file.

A token of LONG_TOKEN_CHARACTERS or more cannot be guessed. So it is always checked immediately, even after many wrong
tokens. A secret that a person may have chosen, such as the super user's secret, is checked by a GuardedCheck, which
limits the number of guesses.
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
"""Minimum number of characters of a token that cannot be guessed: 32 random hexadecimal digits have 128 bits."""
WRONG_SECRETS_MAX: Final = 20
WRONG_SECRETS_S: Final = 30.0


def read_token(path: Path) -> str:
    """Return the token in the file `path`, without the white space around it. Raises ConfigError if the file is
    unreadable or contains no token."""
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token in file {path}: {error.strerror or error}") from None
    if not token:
        raise ConfigError(f"file {path} has no token; write a token to it, for example with `openssl rand -hex 32`")
    return token


def same_token(given: str, wanted: str) -> bool:
    """Return True if the tokens are equal. The comparison takes constant time, so that its duration reveals nothing
    about the token."""
    return hmac.compare_digest(given.encode(), wanted.encode())


def ray_token_check(token_file: Path | None = None) -> Callable[[str], bool]:
    """Return a function that checks, as Ray does, whether a text is the cluster's token.

    Ray has no public function for this check. If Ray's private function no longer exists, the text is compared with the
    token in `token_file`. If no file is given either, the check rejects every text, so nobody can log in as an admin.
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
    """Checks secrets that can be guessed, and limits the number of guesses of all clients together.

    The check returns the name of the role that a secret gives, "" for a wrong secret. After WRONG_SECRETS_MAX wrong
    secrets within WRONG_SECRETS_S, only secrets that were accepted before are checked. For any other secret
    SystemBusyError states how long to wait. Only the application's event loop calls the check.
    """

    def __init__(self, check: Callable[[str], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._check, self._clock = check, clock
        self._key = secrets.token_bytes(32)
        self._right: dict[bytes, str] = {}
        """The role of each accepted secret, by the secret's keyed digest. The number of entries is bounded by the
        number of secrets."""
        self._wrong_s: deque[float] = deque(maxlen=WRONG_SECRETS_MAX)

    def __call__(self, given: str) -> str:
        """Return the name of the role that a secret gives, "" for a wrong secret. Raises SystemBusyError if the secret
        is not checked because of too many wrong secrets."""
        digest = hmac.digest(self._key, given.encode(), "sha256")
        known, now_s = self._right.get(digest), self._clock()
        if known is not None:
            return known
        left_s = self._wrong_s[0] + WRONG_SECRETS_S - now_s if len(self._wrong_s) == WRONG_SECRETS_MAX else 0.0
        if left_s > 0:
            raise SystemBusyError(f"Too many wrong secrets were entered: wait {left_s:.0f} s, or use Ray's token.")
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
    """Return the role that the token `given` has; None for a wrong token. `guarded` returns the name of the token's
    role; it is called only if the other checks fail. If it raises SystemBusyError, this function raises it, too."""
    if is_admin(given):
        return Role.ADMIN
    if viewer_token is not None and same_token(given, viewer_token):
        return Role.VIEWER
    role = guarded(given)
    return Role(role) if role else None
