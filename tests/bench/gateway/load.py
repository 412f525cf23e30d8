"""The load of the gateway's benchmark: a lean HTTP/2 client with encoded messages, in a process of its own.

gRPC for Python costs a client about as much processor time as the server. So this client writes and reads the frames of
HTTP/2 itself: its header blocks have no Huffman code and no table, and it does not decode the server's headers. The
answer of each call is decoded and checked.

The process reads one command per line, as JSON, and writes one result per line: see `main`.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from raymq.gateway.convert.times import duration
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import ClientType, Code, Language
from raymq.gateway.wire.table import SERVICE

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
FRAME_MAX = 16384
WINDOW = 65535
WINDOW_MAX = 2**31 - 1
INITIAL_WINDOW_SIZE = 4
CALL_S = 60.0
HEARTBEAT_S = 10.0
ASSIGNMENT_S = 5.0
POLL_MS = 20_000
DRAIN_POLL_MS = 1_000
RETRY_S = 0.02

Done = Callable[[list[bytes]], None]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return the bytes of a frame."""
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


def header_block(method: str, client_id: str) -> bytes:
    """Return the header block of a call: literal fields without an index."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/{SERVICE}/{method}",
        ":authority": "gateway",
        "content-type": "application/grpc",
        "te": "trailers",
        "grpc-timeout": f"{int(CALL_S)}S",
        "x-mq-client-id": client_id,
        "x-mq-language": "JAVA",
        "x-mq-client-version": "5.0.7",
        "x-mq-protocol": "v2",
    }
    return b"".join(
        b"\0%c%b%c%b" % (len(name), name.encode(), len(value), value.encode()) for name, value in fields.items()
    )


def grpc_message(data: bytes) -> bytes:
    """Return a message with gRPC's prefix."""
    return b"\0" + len(data).to_bytes(4) + data


class Connection:
    """One connection of a client. `begin` starts calls, `read` handles what the server sent."""

    def __init__(self, port: int, client_id: str) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._client_id, self._blocks = client_id, dict[str, bytes]()
        self._stream, self._received, self._window, self._initial = -1, b"", WINDOW, WINDOW
        self._calls: dict[int, tuple[bytearray, Done]] = {}
        self._waiting: deque[tuple[int, bytes, bool]] = deque()
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, WINDOW_MAX)
        more = frame(WINDOW_UPDATE, 0, 0, (WINDOW_MAX - WINDOW).to_bytes(4))
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings) + more)

    def begin(self, method: str, request: bytes, done: Done, *, ends: bool = True) -> None:
        """Start a call. `done` gets the messages of the answer. `ends`: False leaves the stream of requests open."""
        block = self._blocks.get(method)
        if block is None:
            block = self._blocks[method] = header_block(method, self._client_id)
        self._stream += 2
        self._calls[self._stream] = bytearray(), done
        self._waiting.append((self._stream, request, ends))
        self._send(frame(HEADERS, END_HEADERS, self._stream, block))

    def _send(self, head: bytes = b"") -> None:
        """Send as many waiting requests as the connection's window allows."""
        parts = [head]
        while self._waiting and len(self._waiting[0][1]) <= self._window:
            stream, data, ends = self._waiting.popleft()
            self._window -= len(data)
            for first in range(0, len(data), FRAME_MAX):
                is_last = ends and first + FRAME_MAX >= len(data)
                parts.append(frame(DATA, END_STREAM if is_last else 0, stream, data[first : first + FRAME_MAX]))
        self.socket.sendall(b"".join(parts))

    def read(self) -> None:
        """Read what has arrived. Raises ConnectionError if the server has closed the connection."""
        data = self.socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the gateway closed the connection")
        data, at = self._received + data, 0
        while len(data) - at >= 9:
            length = int.from_bytes(data[at : at + 3])
            if len(data) - at < 9 + length:
                break
            kind, flags, stream = data[at + 3], data[at + 4], int.from_bytes(data[at + 5 : at + 9])
            payload = data[at + 9 : at + 9 + length]
            at += 9 + length
            self._take(kind, flags, stream, payload)
        self._received = data[at:]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._calls[stream][0].extend(payload)
        elif kind == SETTINGS and not flags & ACK:
            self.socket.sendall(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.socket.sendall(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload)
            self._send()
        elif kind == GOAWAY or (kind == RST_STREAM and stream in self._calls):
            raise ConnectionError(f"the gateway ended a stream or the connection: {payload!r}")
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            answer, done = self._calls.pop(stream)
            done(list(messages_of(answer)))


def messages_of(data: bytearray) -> Iterator[bytes]:
    """Yield the messages of an answer, without gRPC's prefixes."""
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at + 1 : at + 5])
        yield bytes(data[at + 5 : at + 5 + length])
        at += 5 + length


class Load:
    """Connections to a gateway, and the loop that reads them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self.connections: list[Connection] = []
        self._numbers = iter(range(1 << 62))

    def connect(self, port: int, count: int, name: str) -> None:
        """Replace the connections by `count` new ones, each of a client of its own."""
        for old in self.connections:
            self._selector.unregister(old.socket)
            old.socket.close()
        self.connections = []
        self.connections = [Connection(port, f"{name}-{number}") for number in range(count)]
        for one in self.connections:
            self._selector.register(one.socket, selectors.EVENT_READ, one)

    def first_send(self, port: int, topic: str, size: int) -> None:
        """Connect one client and send one message. Tries again until a gateway answers: a gateway that was killed may
        have a connection in its queue, and resets it."""
        while True:
            try:
                self.connect(port, 1, "again")
                self.send(topic, size, count=1, per_request=1, in_flight=1)
            except ConnectionError:
                time.sleep(RETRY_S)
            else:
                return

    def wait(self, is_over: Callable[[], bool], timeout_s: float = 0.5) -> None:
        """Read until `is_over` returns True."""
        while not is_over():
            for key, _ in self._selector.select(timeout_s):
                key.data.read()

    def send(self, topic: str, size: int, count: int, per_request: int, in_flight: int) -> dict[str, Any]:
        """Send `count` messages of `size` bytes. Returns the seconds, and the latencies of the requests in us, in
        ascending order."""
        requests = deque(self._send_requests(topic, size, count, per_request))
        left, times = len(requests), list[float]()

        def begin(one: Connection) -> None:
            if requests:
                start_s = time.perf_counter()
                one.begin("SendMessage", requests.popleft(), lambda answer: done(one, start_s, answer))

        def done(one: Connection, start_s: float, answer: list[bytes]) -> None:
            nonlocal left
            times.append((time.perf_counter() - start_s) * 1e6)
            [data] = answer
            status = wire.SendMessageResponse.FromString(data).status
            if status.code != Code.OK:
                raise AssertionError(f"a send failed: {status}")
            left -= 1
            begin(one)

        start_s = time.perf_counter()
        for number in range(in_flight):
            begin(self.connections[number % len(self.connections)])
        self.wait(lambda: not left)
        return {"seconds": time.perf_counter() - start_s, "latencies_us": sorted(times)}

    def _send_requests(self, topic: str, size: int, count: int, per_request: int) -> Iterator[bytes]:
        resource, body = wire.Resource(name=topic), b"x" * size
        for _ in range(count // per_request):
            sent = [
                wire.Message(
                    topic=resource,
                    body=body,
                    system_properties=wire.SystemProperties(
                        message_id=f"{time.time_ns():016X}{next(self._numbers):018X}", message_type=1, body_encoding=1
                    ),
                )
                for _ in range(per_request)
            ]
            yield grpc_message(wire.SendMessageRequest(messages=sent).SerializeToString())

    def receive(self, topic: str, group: str, count: int, in_flight: int, *, each: bool) -> dict[str, Any]:
        """Receive and acknowledge `count` messages, 32 at a time. `each`: acknowledge each message in a call of its
        own, as the official clients do."""
        resource, of_group = wire.Resource(name=topic), wire.Resource(name=group)
        request = grpc_message(_receive_request(topic, group, DRAIN_POLL_MS))
        left, receiving = count, 0

        def receive(one: Connection) -> None:
            nonlocal receiving
            if left > 0:
                receiving += 1
                one.begin("ReceiveMessage", request, lambda answer: received(one, answer))

        def received(one: Connection, answer: list[bytes]) -> None:
            nonlocal receiving
            receiving -= 1
            found = [wire.ReceiveMessageResponse.FromString(data) for data in answer]
            handles = [part.message.system_properties.receipt_handle for part in found if part.HasField("message")]
            parts = [[handle] for handle in handles] if each else [handles] * bool(handles)
            waiting = len(parts)

            def acked(data: list[bytes]) -> None:
                nonlocal left, waiting
                [ack] = data
                answer = wire.AckMessageResponse.FromString(ack)
                if answer.status.code != Code.OK:
                    raise AssertionError(f"an acknowledgement failed: {answer.status}")
                left -= len(answer.entries)
                waiting -= 1
                if not waiting:
                    receive(one)

            for part in parts:
                entries = [wire.AckMessageEntry(receipt_handle=handle) for handle in part]
                ack = wire.AckMessageRequest(group=of_group, topic=resource, entries=entries)
                one.begin("AckMessage", grpc_message(ack.SerializeToString()), acked)
            if not parts:
                receive(one)

        start_s = time.perf_counter()
        for number in range(in_flight):
            receive(self.connections[number % len(self.connections)])
        self.wait(lambda: left <= 0)
        seconds = time.perf_counter() - start_s
        # a receive that still waits would take messages of the next round
        self.wait(lambda: not receiving)
        return {"seconds": seconds}

    def idle(self, topic: str, group: str, *, starts: bool) -> None:
        """Let each connection be a push consumer without messages for the time of a long poll, with the calls of the
        official clients: a Telemetry stream, heartbeats, questions about the assignment, and a receive that always
        waits. `starts`: begin the streams and receives, evenly over this time."""
        resource, of_group = wire.Resource(name=topic), wire.Resource(name=group)
        entry = wire.SubscriptionEntry(topic=resource, expression=wire.FilterExpression(type=1, expression="*"))
        settings = wire.Settings(
            client_type=ClientType.PUSH_CONSUMER,
            subscription=wire.Subscription(group=of_group, subscriptions=[entry]),
            user_agent=wire.UA(language=Language.JAVA, version="5.0.7"),
        )
        command = grpc_message(wire.TelemetryCommand(settings=settings).SerializeToString())
        present = wire.HeartbeatRequest(group=of_group, client_type=ClientType.PUSH_CONSUMER)
        heartbeat = grpc_message(present.SerializeToString())
        question = wire.QueryAssignmentRequest(topic=resource, group=of_group)
        assignment = grpc_message(question.SerializeToString())
        request = grpc_message(_receive_request(topic, group, POLL_MS))

        def receive(one: Connection) -> None:
            one.begin("ReceiveMessage", request, lambda answer: received(one, answer))

        def received(one: Connection, answer: list[bytes]) -> None:
            status = wire.ReceiveMessageResponse.FromString(answer[0]).status
            if status.code not in (Code.OK, Code.MESSAGE_NOT_FOUND):
                raise AssertionError(f"a receive failed: {status}")
            receive(one)

        def start(one: Connection) -> None:
            one.begin("Telemetry", command, lambda answer: None, ends=False)
            receive(one)

        def beat(one: Connection) -> None:
            one.begin("Heartbeat", heartbeat, lambda answer: None)

        def ask(one: Connection) -> None:
            one.begin("QueryAssignment", assignment, lambda answer: None)

        begin_s, poll_s = time.monotonic(), POLL_MS / 1000
        repeated = [(start, poll_s)] * starts + [(beat, HEARTBEAT_S), (ask, ASSIGNMENT_S)]
        due = [
            (begin_s + every_s * (turn + number / len(self.connections)), one, act)
            for number, one in enumerate(self.connections)
            for act, every_s in repeated
            for turn in range(int(poll_s // every_s))
        ]
        due.sort(key=lambda entry: entry[0], reverse=True)

        def is_over() -> bool:
            now_s = time.monotonic()
            while due and due[-1][0] <= now_s:
                _, one, act = due.pop()
                act(one)
            return now_s >= begin_s + poll_s

        self.wait(is_over, 0.02)


def _receive_request(topic: str, group: str, poll_ms: int) -> bytes:
    request = wire.ReceiveMessageRequest(
        group=wire.Resource(name=group),
        message_queue=wire.MessageQueue(topic=wire.Resource(name=topic)),
        batch_size=32,
        invisible_duration=duration(60_000),
        long_polling_timeout=duration(poll_ms),
    )
    return request.SerializeToString()


def main() -> None:
    """Carry out the commands: a line of JSON with the name of a method of Load, and its arguments. Each result is a
    line of JSON."""
    load = Load()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(load, name)(**arguments)), flush=True)


if __name__ == "__main__":
    main()
