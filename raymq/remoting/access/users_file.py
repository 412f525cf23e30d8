"""The file of users and policies that `raymq up` reads (setting access.users_file): YAML, mode 0600, because it holds
secrets.

    users:
      - name: orders-team
        secret: a long secret             # or secret_file: PATH
        type: Normal                      # or Super; Normal if it is left out
        policies:
          - {resource: "Topic:orders", actions: [Pub, Sub]}
          - {resource: "Group:billing*", actions: [Sub], decision: Allow, sources: [10.0.0.0/8]}

A user may also have `status` and quotas (raymq.remoting.access.users.Bounds), and an entry may also have `policy_type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import yaml

from raymq.common.errors import ConfigError, InvalidArgumentError
from raymq.remoting.access.credentials import read_private, read_secret
from raymq.remoting.access.policies import make_entry
from raymq.remoting.access.state import AuthState
from raymq.remoting.access.users import BOUNDS, Bounds, UserStatus, UserType, make_user

USERS_FILE_MAX_BYTES: Final = 1 << 20

_USER_KEYS: Final = frozenset(("name", "secret", "secret_file", "type", "status", "policies", *BOUNDS))
_ENTRY_KEYS: Final = frozenset(("resource", "actions", "decision", "sources", "policy_type"))


def read_users_file(file: Path, state: AuthState) -> AuthState:
    """Return `state` with the users and policies of `file` added. Raises ConfigError if the file has a mistake. The
    error names the mistake, and never a secret."""
    try:
        content = yaml.safe_load(read_private(file.expanduser(), USERS_FILE_MAX_BYTES))
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        raise ConfigError(f"file {file} is not YAML{('' if where is None else f' (line {where.line + 1})')}") from None
    users = content.get("users") if isinstance(content, dict) and content.keys() == {"users"} else None
    if not isinstance(users, list):
        raise ConfigError(f"file {file} must have exactly one key, users, with a list of users")
    for number, one in enumerate(users, 1):
        try:
            state = _with_user(state, _checked(one, _USER_KEYS))
        except (InvalidArgumentError, ValueError, TypeError) as error:
            raise ConfigError(f"{file}: user {number}: {error}") from None
    return state


def _with_user(state: AuthState, values: Mapping[str, Any]) -> AuthState:
    name = values.get("name")
    if not isinstance(name, str) or ("secret" in values) == ("secret_file" in values):
        raise InvalidArgumentError("a user needs a name, and exactly one of secret and secret_file")
    user = make_user(
        name,
        values["secret"] if "secret" in values else read_secret(Path(values["secret_file"])),
        type=UserType(values.get("type", UserType.NORMAL.value)),
        status=UserStatus(values.get("status", UserStatus.ENABLE.value)),
        **cast("Bounds", {bound: values[bound] for bound in BOUNDS if bound in values}),
    )
    state = state.with_user(user, is_new=True)
    policies = values.get("policies") or []
    if not isinstance(policies, list):
        raise InvalidArgumentError("policies must be a list")
    entries = [make_entry(**_checked(one, _ENTRY_KEYS)) for one in policies]
    return state.with_entries(name, entries, is_new=True) if entries else state


def _checked(values: Any, known: frozenset[str]) -> dict[str, Any]:
    if not isinstance(values, dict) or not values.keys() <= known:
        raise InvalidArgumentError(f"a user may only have the keys {', '.join(sorted(known))}")
    return values
