"""Tokens: that of the admins is Ray's own, that of the viewers is in a file of theirs."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path

from raymq.console.security.users import Role
from raymq.errors import ConfigError


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


def role_of_token(given: str, is_admin: Callable[[str], bool], viewer_token: str | None) -> Role | None:
    """The role that a token gives, None if it is wrong."""
    if is_admin(given):
        return Role.ADMIN
    if viewer_token is not None and same_token(given, viewer_token):
        return Role.VIEWER
    return None
