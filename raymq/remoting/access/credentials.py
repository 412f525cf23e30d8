"""Credentials: the user name and secret with which a client signs its requests, and where the client finds them.

The client uses the first of these sources. (1) The argument of `raymq.connect`. (2) The variable RAYMQ_USER, with
RAYMQ_SECRET or with RAYMQ_SECRET_FILE, a file that holds only the secret. (3) The file that RAYMQ_CREDENTIALS names, or
~/.raymq/credentials, with the two lines ``user: NAME`` and ``secret: SECRET``. A file with a secret must belong to the
user of the process and be readable by nobody else.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

from raymq.common.errors import ConfigError
from raymq.common.identity import Identity
from raymq.remoting.access.users import INTERNAL_USER, check_user_name, derive_key

USER_VARIABLE: Final = "RAYMQ_USER"
SECRET_VARIABLE: Final = "RAYMQ_SECRET"
SECRET_FILE_VARIABLE: Final = "RAYMQ_SECRET_FILE"
CREDENTIALS_VARIABLE: Final = "RAYMQ_CREDENTIALS"
CREDENTIAL_VARIABLES: Final = (USER_VARIABLE, SECRET_VARIABLE, SECRET_FILE_VARIABLE, CREDENTIALS_VARIABLE)
"""The environment variables from which a process can get its credentials."""
CREDENTIALS_FILE: Final = Path("~/.raymq/credentials")
SECRET_FILE_MAX_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user's name and secret. The `repr` does not show the secret. Raises InvalidArgumentError if the name or secret
    is not allowed.

    >>> Credentials("orders-team", "a long secret")
    Credentials(user='orders-team')
    """

    user: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        if self.user != INTERNAL_USER:
            check_user_name(self.user)
        _ = self.key  # Deriving the key raises InvalidArgumentError if the secret is too short.

    @property
    def identity(self) -> Identity:
        """The identity (raymq.common.identity) with which a process signs its calls if it uses these
        credentials."""
        return Identity(self.user, self.key)

    @property
    def key(self) -> bytes:
        """The key for signatures, derived from the secret (raymq.remoting.access.users.derive_key). Computed once per
        process."""
        return _key(self.user, self.secret)


def find_credentials(
    given: Credentials | None = None, *, environment: Mapping[str, str] | None = None
) -> Credentials | None:
    """Return the credentials of this process, from the first source that has any; None if no source has any. The
    module's docstring lists the sources.

    Raises ConfigError if the user or the secret is missing. Also raises ConfigError if a file is readable by others,
    belongs to another user, or does not hold credentials.
    """
    if given is not None:
        return given
    variables = os.environ if environment is None else environment
    user = variables.get(USER_VARIABLE, "")
    secret, secret_file = variables.get(SECRET_VARIABLE, ""), variables.get(SECRET_FILE_VARIABLE, "")
    if user or secret or secret_file:
        if not user or bool(secret) == bool(secret_file):
            raise ConfigError(
                f"set {USER_VARIABLE} together with exactly one of {SECRET_VARIABLE} and {SECRET_FILE_VARIABLE}, "
                "or none of these variables"
            )
        return Credentials(user, secret or read_secret(Path(secret_file)))
    named = variables.get(CREDENTIALS_VARIABLE, "")
    file = Path(named or CREDENTIALS_FILE).expanduser()
    if not named and not file.exists():
        return None
    return _read_credentials(file)


def read_secret(file: Path) -> str:
    """Return the secret in `file`, without the line end.

    Raises ConfigError if the file is unreadable, too large, owned by another user, or readable by others.
    """
    text = read_private(file.expanduser()).strip("\r\n")
    if not text or "\n" in text:
        raise ConfigError(f"file {file} must contain one line with a secret, and nothing else")
    return text


def _read_credentials(file: Path) -> Credentials:
    values: dict[str, str] = {}
    for line in read_private(file).splitlines():
        name, colon, value = line.partition(":")
        if line.strip() and not line.startswith("#"):
            if not colon or name.strip() not in ("user", "secret") or name.strip() in values:
                raise ConfigError(f"file {file} must contain the lines `user: NAME` and `secret: SECRET`, once each")
            values[name.strip()] = value.strip()
    if len(values) != 2:
        raise ConfigError(f"file {file} must contain the lines `user: NAME` and `secret: SECRET`")
    return Credentials(values["user"], values["secret"])


def read_private(file: Path, max_bytes: int = SECRET_FILE_MAX_BYTES) -> str:
    """Return the text of a file that holds secrets. Raises ConfigError if the file is unreadable, larger than
    `max_bytes`, owned by another user, or readable by others."""
    try:
        with file.open("rb") as stream:
            # Check the file that was opened (`fstat`). Another file may have replaced it since, and may now have its
            # name.
            about = os.fstat(stream.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ConfigError(f"{file} is not a file")
            if about.st_uid != os.geteuid():
                raise ConfigError(f"file {file} belongs to another user of this machine, so its secret is not used")
            if about.st_mode & 0o077:
                raise ConfigError(
                    f"other users of this machine can read file {file}, which contains a secret: chmod 600 {file}"
                )
            content = stream.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"cannot read file {file}: {error.strerror}") from None
    if len(content) > max_bytes:
        raise ConfigError(f"file {file} has more than {max_bytes} bytes, so it is not a file of credentials")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"file {file} is not a text in UTF-8") from None


@lru_cache(maxsize=64)
def _key(user: str, secret: str) -> bytes:
    return derive_key(user, secret)
