"""Access control at launch: the user as whom the launcher acts, and the keys that it passes to the servers.

raymq's own actors sign their requests with a separate key. The first start with access control creates this key in
`access/key` below `data_dir` on the head node, readable only for the launcher's user (mode 0600). `access/key.sha256`
has the key's checksum: with a key that the disk has changed, new servers could not call the running servers. The
servers get the key with their arguments, which Ray's listings do not contain. If the launcher starts servers, it acts
as the super user of the settings. Otherwise it acts as the user that its environment names
(raymq.remoting.access.credentials).
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.access.authenticated_server import ServerAccess, hand_on
from actors.actor_class import remote_function
from placement.inventory import head_node_id, running
from raymq.common import identity
from raymq.common.config.access import AccessOptions
from raymq.common.config.cluster import ClusterSettings, data_dir_here
from raymq.common.errors import AuthenticationError, ConfigError
from raymq.common.identity import Identity
from raymq.common.names import USERS_BROKER
from raymq.remoting.access.credentials import Credentials, find_credentials, read_secret
from raymq.remoting.access.state import NO_USERS
from raymq.remoting.access.users import INTERNAL_USER, KEY_BYTES, UserType, make_user
from raymq.remoting.access.users_file import read_users_file
from raymq.remoting.actor_ref import ActorRef, resolve
from storage.files import disk

KEY_FILE: Final = Path("access") / "key"
ACCESS_TIMEOUT_S: Final = 30.0


def act_as_owner(settings: Mapping[str, Any] | None) -> None:
    """If `settings` enable access control, let this process act as their super user. Otherwise act as the user that
    this process's environment names, if any. Raises ConfigError if the credentials are incomplete, or if a secret
    cannot be read."""
    options = None if settings is None else ClusterSettings(**settings).access
    if options is None or not options.enable or options.super_secret_file is None:
        _act_as_caller()
    else:
        identity.take(Credentials(options.super_user, read_secret(options.super_secret_file)).identity)


def _act_as_caller() -> None:
    credentials = find_credentials()
    if credentials is not None:
        identity.take(credentials.identity)


def prepare(options: AccessOptions, data_dir: Path) -> None:
    """Prepare this process for starting servers with or without access control, and act as a user who may start them.

    Raises ConfigError if the running servers have another value of `access.enable`, or if the super user's secret
    cannot be used.
    """
    _check_running(options)
    if not options.enable or options.super_secret_file is None:
        _act_as_caller()
        return
    credentials = Credentials(options.super_user, read_secret(options.super_secret_file))
    on_head = NodeAffinitySchedulingStrategy(head_node_id(), soft=False)
    reference = _remote_internal_key.options(scheduling_strategy=on_head).remote(str(data_dir))
    key: bytes = resolve(reference, "the key of raymq's actors", ACCESS_TIMEOUT_S)
    state = NO_USERS.with_user(make_user(credentials.user, credentials.secret, type=UserType.SUPER), is_new=True)
    if options.users_file is not None:
        state = read_users_file(options.users_file, state)
    hand_on(ServerAccess("", Identity(INTERNAL_USER, key), state, USERS_BROKER, credentials.user))
    identity.take(credentials.identity)


def _check_running(options: AccessOptions) -> None:
    """Raise ConfigError if `options` enables access control and the running servers have none, or the reverse."""
    servers = [name for name in running() if name.startswith("nameserver-")]
    if not servers:
        return
    try:
        ActorRef(servers[0]).call("brokers", timeout_s=ACCESS_TIMEOUT_S)
        asks = False
    except AuthenticationError:
        asks = True
    if asks != options.enable:
        raise ConfigError(
            f"access.enable is {str(options.enable).lower()}, but access is {('on' if asks else 'off')} in the "
            "running raymq: stop raymq with `raymq down` first"
        )


def internal_key(data_dir: str) -> bytes:
    """Return the key with which raymq's own actors sign requests. The key is created if this node has none. Raises
    OSError if the key file cannot be read or written."""
    file = data_dir_here(Path(data_dir)) / KEY_FILE
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = file.with_name(f"key.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        return _read_key(file)
    except FileNotFoundError:
        disk.unlink(_checksum_file(file))
    descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(secrets.token_bytes(KEY_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
        try:
            # Two launchers may create a key at the same time. The file that is linked first stays, and both launchers
            # read the key from it.
            os.link(made, file)
        except FileExistsError:
            pass
    finally:
        made.unlink()
    return _read_key(file)


def _read_key(file: Path) -> bytes:
    about = file.stat()
    if about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise ConfigError(
            f"file {file}, the key of raymq's actors, belongs to another user or is readable for other users: "
            "remove the file"
        )
    key = file.read_bytes()
    if len(key) != KEY_BYTES:
        raise ConfigError(f"file {file} has {len(key)} bytes and is not a key of raymq's actors: remove the file")
    checksum, path = hashlib.sha256(key).hexdigest(), _checksum_file(file)
    if not path.exists():
        disk.replace_file(path, checksum.encode())
    elif path.read_bytes() != checksum.encode():
        raise ConfigError(
            f"file {file}, the key of raymq's actors, does not match its checksum in {path.name}: one of the two files "
            "is damaged. Stop raymq (raymq down), then remove both files: the next start makes a new key"
        )
    return key


def _checksum_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.sha256")


_remote_internal_key = ray.remote(num_cpus=0, max_retries=0)(remote_function(internal_key))
