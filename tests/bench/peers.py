"""The peers: systems that the benchmark compares with raymq, each used as its documentation advises for speed.

A system that is not installed is omitted.

    redis     streams over a Unix socket, with hiredis; appendonly, with an fsync each second for ASYNC_FLUSH and
              always for SYNC_FLUSH; pipelines without a transaction
    nats      JetStream with file storage over TCP on loopback; publish_async with a window of acknowledgements
    ray       ray.util.queue.Queue: in memory, lost with its process; batches where the API has them

The servers are this program's children and end with it. They listen on loopback or on a Unix socket only.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.support.ports import free_port

T = TypeVar("T")

START_TIMEOUT_S: Final = 10.0
PIPELINE: Final = 1000
"""Number of Redis commands in one pipeline. Of 100, 500, 1000 and 5000 commands, 1000 were the fastest."""
WINDOW: Final = 2000
"""Maximum number of unacknowledged messages that the NATS client has in flight."""
READ: Final = 5000
"""Number of messages that the benchmark reads from Redis with one read. NATS reads 500 messages at once, because its
client is no faster with larger batches."""
STREAM: Final = "bench"


class RedisPeer:
    """A Redis server, and a client of this server. `always`: the server flushes each message to disk before it
    answers."""

    def __init__(self, directory: Path, *, always: bool) -> None:
        self.socket = str(directory / "redis.sock")
        self._server = subprocess.Popen(
            [
                *("redis-server", "--port", "0", "--unixsocket", self.socket, "--dir", str(directory), "--save", ""),
                *("--appendonly", "yes", "--appendfsync", "always" if always else "everysec", "--daemonize", "no"),
            ],
            stdout=subprocess.DEVNULL,
        )
        self.pid = self._server.pid
        self.client = self.connect()
        _wait_until(lambda: Path(self.socket).exists() and bool(self.client.ping()))

    def connect(self) -> Any:
        """Return a new client of the Redis server."""
        import redis

        return redis.Redis(unix_socket_path=self.socket, protocol=2)

    def send(self, body: bytes) -> None:
        """Send a message and wait for its acknowledgement."""
        self.client.xadd(STREAM, {b"b": body})

    def send_many(self, body: bytes, count: int, pipeline: int = PIPELINE) -> None:
        """Send `count` messages in pipelines. Returns after all messages are acknowledged."""
        for first in range(0, count, pipeline):
            pipe = self.client.pipeline(transaction=False)
            for _ in range(min(pipeline, count - first)):
                pipe.xadd(STREAM, {b"b": body})
            pipe.execute()

    def read_all(self, group: str, count: int) -> None:
        """Read `count` messages with a new consumer group, from the first message. Acknowledges the messages of each
        read."""
        self.client.xgroup_create(STREAM, group, "0")
        left = count
        while left > 0:
            [(_, entries)] = self.client.xreadgroup(group, "reader", {STREAM: ">"}, count=READ)
            for _, fields in entries:
                fields[b"b"]
            self.client.xack(STREAM, group, *[entry_id for entry_id, _ in entries])
            left -= len(entries)

    def clear(self) -> None:
        """Remove all messages and consumer groups from Redis."""
        self.client.flushall()

    def close(self) -> None:
        """Close the Redis client and stop the Redis server."""
        self.client.close()
        _end(self._server)


class NatsPeer:
    """A NATS server with JetStream file storage, and a client whose event loop runs only during calls."""

    def __init__(self, directory: Path) -> None:
        port = free_port()
        store = directory / "nats"
        self._server = subprocess.Popen(
            [_program("nats-server"), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(store)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.pid = self._server.pid
        self._loop = asyncio.new_event_loop()
        _wait_until(lambda: _accepts(port))
        self._run(self._connect(f"nats://127.0.0.1:{port}"))

    async def _connect(self, url: str) -> None:
        import nats
        from nats.js.api import StorageType, StreamConfig

        self._client = await nats.connect(url)
        self._stream = self._client.jetstream(publish_async_max_pending=WINDOW)
        await self._stream.add_stream(StreamConfig(name=STREAM, subjects=[STREAM], storage=StorageType.FILE))

    def send(self, body: bytes) -> None:
        """Send a message and wait for its acknowledgement."""
        self._run(self._stream.publish(STREAM, body))

    def send_many(self, body: bytes, count: int) -> None:
        """Send `count` messages, with at most WINDOW unacknowledged messages in flight. Returns after all messages are
        acknowledged."""

        async def publish() -> None:
            for _ in range(count):
                await self._stream.publish_async(STREAM, body)
            await self._stream.publish_async_completed()

        self._run(publish())

    def read_all(self, group: str, count: int) -> None:
        """Read `count` messages as a new durable consumer, from the first message, and acknowledge each
        message."""

        async def read() -> None:
            subscription = await self._stream.pull_subscribe(STREAM, durable=group)
            left = count
            while left > 0:
                messages = await subscription.fetch(min(500, left), timeout=10)
                for message in messages:
                    await message.ack()
                left -= len(messages)
            await subscription.unsubscribe()

        self._run(read())

    def clear(self) -> None:
        """Remove all messages from JetStream."""
        self._run(self._stream.purge_stream(STREAM))

    def close(self) -> None:
        """Close the NATS client and stop the NATS server."""
        self._run(self._client.close())
        self._loop.close()
        _end(self._server)

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)


class RayQueue:
    """A ray.util.queue.Queue in the Ray cluster to which this program is connected."""

    def __init__(self) -> None:
        from ray.util.queue import Queue

        self._queue = Queue()

    def send(self, body: bytes) -> None:
        """Put one message into the Ray queue."""
        self._queue.put(body)

    def send_many(self, body: bytes, count: int) -> None:
        """Put `count` messages into the Ray queue, in batches of PIPELINE messages."""
        for first in range(0, count, PIPELINE):
            self._queue.put_nowait_batch([body] * min(PIPELINE, count - first))

    def read_all(self, group: str, count: int) -> None:
        """Take `count` messages from the Ray queue, in batches of PIPELINE messages. `group` is ignored, because a Ray
        queue has no consumer groups."""
        for first in range(0, count, PIPELINE):
            self._queue.get_nowait_batch(min(PIPELINE, count - first))

    def clear(self) -> None:
        """Remove all messages that are left in the Ray queue."""
        while size := self._queue.qsize():
            self._queue.get_nowait_batch(size)

    def close(self) -> None:
        """Stop the Ray queue's actor."""
        self._queue.shutdown()


@contextmanager
def peers(directory: Path, *, sync: bool, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Start the installed peers (other queue systems) among `names` for the duration of a `with` block. Yields them by
    name.

    `sync`: start only peers that can be as durable as SYNC_FLUSH, that is, Redis.
    """
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        if "redis" in names and shutil.which("redis-server"):
            found["redis"] = RedisPeer(directory, always=sync)
            stack.callback(found["redis"].close)
        if "nats" in names and not sync and _program("nats-server"):
            found["nats"] = NatsPeer(directory)
            stack.callback(found["nats"].close)
        if "ray" in names and not sync:
            found["ray"] = RayQueue()
            stack.callback(found["ray"].close)
        yield found


def peer_versions() -> dict[str, str]:
    """Return the version of each installed peer, by the peer's name. A server without a readable version has the first
    line of its answer to `--version`."""
    found = {"ray": version("ray")}
    for name, program in (("redis", "redis-server"), ("nats", "nats-server")):
        if path := _program(program):
            done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
            line = done.stdout.partition("\n")[0].strip()
            numbers = re.search(r"\bv=?(\d+(?:\.\d+)+)", line)
            found[name] = line if numbers is None else numbers[1]
    return found


def _program(name: str) -> str:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin") or ""


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_until(ready: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            if ready():
                return
        except Exception:  # While a server is starting, its client may raise any error. Retry until the deadline.
            if time.monotonic() > deadline_s:
                raise
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"a peer's server does not answer within {START_TIMEOUT_S:g} s")
        time.sleep(0.02)


def _end(server: subprocess.Popen[Any]) -> None:
    server.terminate()
    try:
        server.wait(START_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
