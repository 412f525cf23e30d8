"""The actor `console`: the web console's HTTP server, in a thread of the actor's process on the head node.

After a crash Ray restarts the console within seconds, on the same port. The console's sessions and charts are lost. No
server waits for the console. The console may wait for every server, in a bounded pool of threads.

The console binds its address before it starts anything else:

    console.port   socket
    8270           this port
    0              any free port, which the console's next process uses again

The file `raymq-console-port` in the folder of Ray's session contains the port as text. If another program uses the port
when the console is restarted, the console logs a warning and takes any free port.
"""

from __future__ import annotations

import logging
import os
import socket
import ssl
import time
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.access.authenticated_server import access_for, authenticated_server
from actors.actor_class import actor_class
from actors.options import PERSISTENT
from placement.actor_lifecycle import GOES_ON, brought_back, check_address, end_actor, refused
from placement.console.live_control import live_cluster
from placement.inventory import head_node_id, running
from raymq.client.client import Client, connect
from raymq.common.closing import closed_on_error
from raymq.common.config.console import ConsoleOptions
from raymq.common.errors import ConfigError, RaymqError, RequestTimeoutError
from raymq.common.names import CONSOLE
from raymq.remoting.actor_ref import ActorRef, was_restarted
from raymq.tools.console.app import ConsoleServer, create_app
from raymq.tools.console.security.sessions import Role
from raymq.tools.console.security.tokens import (
    LONG_TOKEN_CHARACTERS,
    GuardedCheck,
    ray_token_check,
    read_token,
    same_token,
)
from raymq.tools.console.settings import ConsoleSettings
from raymq.tools.observability.ray_folder import session_folder

CONSOLE_READY_TIMEOUT_S: Final = 60.0

logger = logging.getLogger(__name__)


class ConsoleService:
    """The class of the console actor, which has the web application and its server. If the start fails, `describe`
    raises the error."""

    def __init__(self, options: ConsoleOptions, cluster_name: str) -> None:
        self._options, self._cluster_name = options, cluster_name
        self._client: Client | None = None
        self._server: ConsoleServer | None = None
        self._port = 0
        self._failure: RaymqError | None = None
        try:
            self._start()
        except RaymqError as error:
            logger.warning("the console is not running: %s", error)
            self._failure = error

    def _start(self) -> None:
        """Listen, connect and serve. If a step fails, closes what the earlier steps opened, and raises the error."""
        options = self._options
        settings = application_settings(options)
        restarted = was_restarted()
        listening = listen(options.host, options.port, session_folder(), restarted=restarted)
        with closed_on_error(listening.close, "the console's socket"):
            self._port = listening.getsockname()[1]
            client = connect()
            with closed_on_error(client.close, "the console's connection"):
                tls: dict[str, Any] = {}
                if options.tls_cert is not None:
                    tls = {"ssl_certfile": str(options.tls_cert), "ssl_keyfile": str(options.tls_key)}
                server = ConsoleServer(create_app(live_cluster(client, self._cluster_name), settings), listening, **tls)
                server.start()
        self._client, self._server = client, server

    def describe(self) -> dict[str, Any]:
        """Return the console's address. If the start failed, raises its error: ConfigError or
        ServiceNotAvailableError."""
        if self._failure is not None:
            # Raise a copy: each raise of one error object makes its traceback longer.
            raise copy(self._failure) from self._failure
        options = self._options
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"{options.scheme}://{host}:{self._port}{options.base_path}/"
        return {
            "url": url,
            "host": options.host,
            "port": self._port,
            "pid": os.getpid(),
            "loopback": options.is_loopback,
        }

    def settings(self) -> ConsoleOptions:
        """Return the settings with which the console was started."""
        return self._options

    def check(self, options: ConsoleOptions) -> None:
        """Raise the error with which a console with other settings would not start on this node, in place of this one:
        ConfigError or ServiceNotAvailableError."""
        application_settings(options)
        check_address(options.host, options.port, held=(self._port,), setting="console.port")

    def status(self) -> dict[str, Any]:
        """Return the console's address for `raymq status`, like `describe`."""
        return self.describe()

    def close(self) -> None:
        """Stop the web server, then disconnect from the cluster."""
        if self._server is not None:
            self._server.stop()
        if self._client is not None:
            self._client.close()


def application_settings(options: ConsoleOptions) -> ConsoleSettings:
    """Return the web application's settings on this node. Raises ConfigError if a token or the certificate cannot be
    used. Also raises ConfigError if other machines can reach the console's address while the cluster has neither tokens
    nor users."""
    server = authenticated_server()
    open_to_all = not cluster_has_tokens() and server is None
    if open_to_all and not options.is_loopback:
        raise ConfigError(
            f"console.host is {options.host}, but Ray's token authentication is off, so everybody who reaches the "
            "console would be an admin: set console.host to 127.0.0.1, start Ray with RAY_AUTH_MODE=token, or "
            "set access.enable"
        )
    if options.tls_cert is not None and options.tls_key is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.tls_cert, options.tls_key)
        # ssl.SSLError is an OSError
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot use console.tls_cert {options.tls_cert} with console.tls_key {options.tls_key}: {error}"
            ) from None
    viewers = options.viewer_token_file
    is_rays = ray_token_check(Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser())

    viewer_token = None if viewers is None else read_token(viewers.expanduser())
    short = viewer_token if viewer_token is not None and len(viewer_token) < LONG_TOKEN_CHARACTERS else None

    def is_admin(token: str) -> bool:
        return cluster_has_tokens() and is_rays(token)

    def role_of_secret(secret: str) -> str:
        if short is not None and same_token(secret, short):
            return Role.VIEWER
        return Role.ADMIN if server is not None and server.is_owners_secret(secret) else ""

    return ConsoleSettings(
        is_admin=is_admin,
        viewer_token=viewer_token if short is None else None,
        guarded=GuardedCheck(role_of_secret),
        open_to_all=open_to_all,
        base_path=options.base_path,
        secure=options.tls_cert is not None,
        show_bodies=options.show_bodies,
        read_only=options.read_only,
        tail_rate=options.tail_rate,
        max_viewers=options.max_viewers,
    )


def cluster_has_tokens() -> bool:
    """Return True if Ray's token authentication is on. Ray has no public function for this check, so a private function
    is used. If Ray has moved it, the result depends on the environment variable RAY_AUTH_MODE."""
    try:
        from ray._private.authentication.authentication_utils import is_token_auth_enabled
    except ImportError:
        return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    return bool(is_token_auth_enabled())


def start_console(options: ConsoleOptions, cluster_name: str) -> dict[str, Any]:
    """Start the console on the head node, unless it already serves with these settings. A console that has other
    settings, whose start has failed, or that does not answer, is ended first. Returns the console's address after the
    console has started to serve.

    If a running console finds that the settings cannot be used on its node, raises the error before it ends. If the
    start fails, ends the console, brings a console with its former settings back, and raises the error, whose text says
    what runs.
    """
    former = None
    if CONSOLE in running():
        former = _settings_of_running()
        if former == options:
            serving = _address_of_running()
            if serving is not None:
                return serving
            former = None
        elif former is not None:
            _check_at_running(options)
        end_actor(CONSOLE)
    try:
        return _started(options, cluster_name)
    except BaseException as error:
        end_actor(CONSOLE)
        if former is None:
            raise
        if not isinstance(error, RaymqError):
            _create(former, cluster_name)
            raise
        raise refused(error, brought_back("the console", partial(_started, former, cluster_name))) from None


def _started(options: ConsoleOptions, cluster_name: str) -> dict[str, Any]:
    """Start the console, and return its address after it has started to serve."""
    _create(options, cluster_name)
    address: dict[str, Any] = ActorRef(CONSOLE).call("describe", timeout_s=CONSOLE_READY_TIMEOUT_S)
    return address


def _create(options: ConsoleOptions, cluster_name: str) -> None:
    on_head = NodeAffinitySchedulingStrategy(head_node_id(), soft=False)
    ConsoleActor.options(name=CONSOLE, get_if_exists=True, scheduling_strategy=on_head).remote(
        options, cluster_name, **access_for(CONSOLE)
    )


def stop_console() -> bool:
    """End the console. Returns False if no console runs."""
    found = CONSOLE in running()
    if found:
        end_actor(CONSOLE)
    return found


def _settings_of_running() -> ConsoleOptions | None:
    """Return the settings of the running console; None if it does not answer."""
    try:
        settings: ConsoleOptions = ActorRef(CONSOLE).call("settings", timeout_s=CONSOLE_READY_TIMEOUT_S)
    except RaymqError as error:
        logger.warning("the console does not answer, and is started again: %s", error)
        return None
    return settings


def _address_of_running() -> dict[str, Any] | None:
    """Return the address of the running console; None if its start has failed, or if it does not answer."""
    try:
        address: dict[str, Any] = ActorRef(CONSOLE).call("describe", timeout_s=CONSOLE_READY_TIMEOUT_S)
    except RaymqError as error:
        logger.warning("the console does not serve, and is started again: %s", error)
        return None
    return address


def _check_at_running(options: ConsoleOptions) -> None:
    """Let the running console check other settings. Raises its error."""
    try:
        ActorRef(CONSOLE).call("check", options, timeout_s=CONSOLE_READY_TIMEOUT_S)
    except RequestTimeoutError as error:
        logger.warning("the console does not check the new settings, and is started again: %s", error)
    except RaymqError as error:
        raise refused(error, GOES_ON) from None


CONSOLE_ACTOR_OPTIONS: Final = {**PERSISTENT, "max_concurrency": 4}
ConsoleActor = ray.remote(**CONSOLE_ACTOR_OPTIONS)(actor_class(ConsoleService))


BIND_TIMEOUT_S: Final = 10.0
"""Maximum time, in seconds, that the console waits for a port that is in use. The port of a killed process may stay in
use for a moment."""
BIND_INTERVAL_S: Final = 0.2
PORT_FILE: Final = "raymq-console-port"


def listen(host: str, port: int, folder: Path, *, restarted: bool, timeout_s: float = BIND_TIMEOUT_S) -> socket.socket:
    """Return a socket that is bound to the console's address but does not listen yet.

    `host`: an address of this node. `port`: the setting console.port. `folder`: the folder of the port file.
    `restarted`: True in a process that Ray restarted, which uses its predecessor's port. Waits up to `timeout_s` for a
    port that is in use. Raises ConfigError if the address is still in use after this time.
    """
    if port:
        return _bind(host, port, timeout_s)
    known = _known_port(folder) if restarted else 0
    if known:
        try:
            return _bind(host, known, timeout_s)
        except ConfigError as error:
            logger.warning("the console moves to another port: %s", error)
    bound = _bind(host, 0, timeout_s)
    try:
        (folder / PORT_FILE).write_text(str(bound.getsockname()[1]))
    except OSError as error:
        logger.warning("the console will have another port after a restart: %s", error)
    return bound


def _known_port(folder: Path) -> int:
    """Return the port of the console's previous process; 0 if unknown."""
    try:
        return int((folder / PORT_FILE).read_text())
    except (OSError, ValueError) as error:
        logger.warning("cannot read the port that the console had before its restart: %s", error)
        return 0


def _bind(host: str, port: int, timeout_s: float) -> socket.socket:
    deadline_s = time.monotonic() + timeout_s
    while True:
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
            return listening
        except OSError as error:
            listening.close()
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"the console cannot listen on {host}:{port}: {error.strerror}; set console.port to a "
                    "free port, or to 0 for any port"
                ) from None
            time.sleep(BIND_INTERVAL_S)
