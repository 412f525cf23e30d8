"""Storage actors without Ray, for tests of lanes (raymq's direct socket connections): a real store behind a real data
plane."""

from __future__ import annotations

import select
import socket
import subprocess
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.core.replica.append_limit import AppendLimit
from actors.core.replica.deleted_topics import DeletedTopics
from actors.replica.data_plane import DataPlane
from actors.replica.sole_replica import SoleReplica
from raymq.common.config.store import StoreOptions
from raymq.common.protocol.store import Boundary, QueueBounds
from raymq.remoting.lane.address import LaneAddress, TlsFiles
from raymq.remoting.lane.connection import LaneRequest
from raymq.remoting.lane.frames import FrameKind
from raymq.remoting.lane.server import LaneServer
from storage.message_store import MessageStore

ECHO, LATER, REFUSE, SILENT, BREAK = range(FrameKind.OTHER, FrameKind.OTHER + 5)
"""Kinds of frames that the server of `echo_server` accepts."""


class StorageDouble:
    """Serves a real store over lanes (direct socket connections), as a storage actor does."""

    def __init__(
        self,
        store: MessageStore,
        *,
        capacity: int = 10_000,
        host: str = "",
        tls: TlsFiles | None = None,
        queues: StoreOptions | None = None,
        **options: Any,
    ) -> None:
        """Start serving `store` over lanes (direct socket connections). `options`: further arguments of the
        data plane."""
        self.store = store
        self.deleted = DeletedTopics(store.read_config, store.write_config)
        self.limit = AppendLimit(capacity)
        self.lanes = DataPlane(
            "test",
            SoleReplica(store),
            deleted=self.deleted,
            limit=self.limit,
            methods={
                "queue_bounds": self.queue_bounds,
                "offset_by_time": self.offset_by_time,
                "query_by_unique_ids": store.queries.by_unique_ids,
            },
            queues=queues or StoreOptions(),
            host=host,
            tls=tls,
            **options,
        )

    def close(self) -> None:
        self.lanes.close()
        self.store.close()

    def queue_bounds(self, topic: str, queue_id: int) -> QueueBounds:
        return self.store.queues.bounds(topic, queue_id)

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int, boundary: Boundary = Boundary.LOWER) -> int:
        return self.store.queues.offset_by_time(topic, queue_id, timestamp_ms, boundary)


class CuttingProxy:
    """A proxy that forwards one connection at a time to a server. It cuts the connection after `cut_bytes` bytes of the
    server's responses."""

    def __init__(self, address: LaneAddress, cut_bytes: int) -> None:
        self._to, self._cut_bytes = (address.host, address.port), cut_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = replace(address, host="127.0.0.1", port=self._listener.getsockname()[1])
        self.cuts = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with closing(client), closing(socket.create_connection(self._to)) as server:
                self._forward(client, server)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        left = self._cut_bytes
        while left > 0:
            for ready in select.select([client, server], [], [])[0]:
                try:
                    data = ready.recv(min(left, 4096) if ready is server else 4096)
                    (client if ready is server else server).sendall(data)
                except OSError:  # the client or the server has closed its connection
                    return
                if not data:
                    return
                left -= len(data) if ready is server else 0
        self.cuts += 1

    def close(self) -> None:
        """Stop accepting connections. A connection that is already forwarded ends when the client or the server closes
        it."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def echo_server(error: Exception | None = None, *, late: list[LaneRequest] | None = None, **options: Any) -> LaneServer:
    """Return a server of lanes (direct socket connections) whose behaviour depends on the kind of the request frame.

    ECHO returns the payload. LATER is kept in `late` without an answer. REFUSE raises `error`. SILENT is never
    answered. BREAK fails like a bug in the server.
    """

    def echo(request: LaneRequest) -> None:
        request.answer(bytes(request.payload), flags=request.flags & ~1, count=request.count)

    def refuse(request: LaneRequest) -> None:
        assert error is not None
        raise error

    def break_down(request: LaneRequest) -> None:
        raise KeyError("a bug")

    kept = [] if late is None else late
    handlers = {ECHO: echo, LATER: kept.append, REFUSE: refuse, SILENT: kept.append, BREAK: break_down}
    return LaneServer("test", handlers, bulk_kinds=frozenset({ECHO}), **options)


def unix_only(address: LaneAddress) -> LaneAddress:
    return LaneAddress(address.name, address.secret)


def make_certificates(directory: Path) -> TlsFiles:
    """Make a certificate authority and a certificate for 127.0.0.1 that this authority signs. Uses the `openssl`
    command."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=60)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    # two certificate authorities need different names, or clients confuse them
    name = f"/CN=raymq test {directory.name}"
    openssl("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", name)
    openssl("req", *curve, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=127.0.0.1")
    openssl(
        *("x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"),
        *("-out", "node.pem"),
    )
    return TlsFiles(str(directory / "node.pem"), str(directory / "node.key"), str(directory / "ca.pem"))
