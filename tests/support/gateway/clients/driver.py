"""Carries out requests with RocketMQ's official Python client: JSON lines on stdin, JSON lines on stdout.

Each request has an id, the name of a method of `Requests`, and arguments. Requests run at the same time, each in a
thread, and each answer has the request's id. The program ends at once when stdin ends.
"""

import gzip
import hashlib
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from rocketmq import (
    ClientConfiguration,
    ConsumeResult,
    Credentials,
    FilterExpression,
    Message,
    MessageListener,
    Producer,
    PushConsumer,
    SimpleConsumer,
    TransactionChecker,
)
from rocketmq.grpc_protocol import FilterType, SendMessageRequest, TransactionResolution

REQUESTS_MAX = 16
REQUEST_TIMEOUT_S = 10
BODY_SHOWN = 100
LONG_POLL_S = 2
LOAD_END_S = 60.0


def now_ms():
    return time.time_ns() // 1_000_000


def made(topic, body, tag=None, key=None, properties=None, group=None, deliver_at_s=None, times=1):
    """Return a message of the client. `times`: how often the text `body` is repeated."""
    message = Message()
    message.topic, message.body = topic, body.encode() * times
    if tag is not None:
        message.tag = tag
    if key is not None:
        message.keys = key
    if group is not None:
        message.message_group = group
    if deliver_at_s is not None:
        message.delivery_timestamp = deliver_at_s
    for name, value in (properties or {}).items():
        message.add_property(name, value)
    return message


def shown(message):
    """Return what a request answers about a received message."""
    return {
        "id": message.message_id,
        "topic": message.topic,
        "body": message.body[:BODY_SHOWN].decode(),
        "size": len(message.body),
        "tag": message.tag,
        "keys": sorted(message.keys),
        "properties": message.properties,
        "group": message.message_group,
        "attempt": message.delivery_attempt,
        "handle": message.receipt_handle,
        "corrupted": message.corrupted,
        "at_ms": now_ms(),
    }


class Listener(MessageListener):
    """Records each message, and holds it until the event `released`, at most for `hold_s`. It fails while a message has
    at most `failures` attempts. In order mode, the client repeats a message without counting its attempts."""

    def __init__(self, failures, hold_s):
        self.records, self.released = [], threading.Event()
        self._failures, self._hold_s = failures, hold_s

    def consume(self, message):
        self.records.append(shown(message))
        self.released.wait(self._hold_s)
        seen = sum(one["id"] == message.message_id for one in list(self.records))
        attempt = max(seen, message.delivery_attempt)
        return ConsumeResult.FAILURE if attempt <= self._failures else ConsumeResult.SUCCESS


class Checker(TransactionChecker):
    """Ends each transaction in the same way, and records the bodies of the messages."""

    def __init__(self, outcome):
        self.records, self._outcome = [], getattr(TransactionResolution, outcome)

    def check(self, message):
        self.records.append(message.body.decode())
        return self._outcome


class Requests:
    def __init__(self):
        self._clients, self._records, self._received, self._loads = {}, {}, {}, {}
        self._listeners, self._transactions = {}, {}

    def _configuration(self, endpoints, credentials, namespace=""):
        return ClientConfiguration(endpoints, Credentials(*credentials), namespace, request_timeout=REQUEST_TIMEOUT_S)

    def _started(self, name, client, records=()):
        client.startup()
        self._clients[name], self._records[name] = client, records

    def open_producer(self, name, endpoints, topics, outcome="COMMIT", credentials=("", ""), tls=False, namespace=""):
        """Start a producer. `outcome`: the answer to each question about a transaction."""
        checker, place = Checker(outcome), self._configuration(endpoints, credentials, namespace)
        self._started(name, Producer(place, topics, checker=checker, tls_enable=tls), checker.records)

    def open_simple(
        self,
        name,
        endpoints,
        group,
        topic,
        expression="*",
        sql=False,
        credentials=("", ""),
        tls=False,
        namespace="",
        wait_s=LONG_POLL_S,
    ):
        """Start a simple consumer. `wait_s`: how long a receive waits for a message."""
        wanted = FilterExpression(expression, FilterType.SQL if sql else FilterType.TAG)
        place = self._configuration(endpoints, credentials, namespace)
        self._started(name, SimpleConsumer(place, group, {topic: wanted}, await_duration=wait_s, tls_enable=tls))

    def open_push(self, name, endpoints, group, topic, failures=0, hold_s=0.0):
        """Start a push consumer. `hold_s`: the longest time for which its listener holds each message."""
        listener, place = Listener(failures, hold_s), self._configuration(endpoints, ("", ""))
        self._listeners[name] = listener
        self._started(name, PushConsumer(place, group, listener, {topic: FilterExpression()}), listener.records)

    def release(self, name):
        """Let the listener of a push consumer hold messages no longer."""
        self._listeners[name].released.set()

    def records(self, name):
        """Return what a push consumer has consumed, or which transactions a producer was asked about."""
        return list(self._records[name])

    def send(self, name, messages):
        """Send messages one after another. Returns their ids and recall handles."""
        receipts = [self._clients[name].send(made(**fields)) for fields in messages]
        return [{"id": one.message_id, "recall": one.recall_handle} for one in receipts]

    def send_compressed(self, name, topic, body):
        """Send a compressed body, which the client can only receive: the call is made without the client's `send`."""
        producer = self._clients[name]
        data, request = gzip.compress(body.encode()), SendMessageRequest()
        message = request.messages.add()
        message.topic.name, message.body = topic, data
        system = message.system_properties
        system.message_id = f"01{os.urandom(16).hex().upper()}"
        system.message_type, system.body_encoding = 1, 2
        system.body_digest.type, system.body_digest.checksum = 2, hashlib.md5(data).hexdigest().upper()
        future = producer.rpc_client.send_message_async(
            producer.client_configuration.rpc_endpoints, request, metadata=producer.sign(), timeout=REQUEST_TIMEOUT_S
        )
        return future.result().status.code

    def transact(self, name, message, end=None):
        """Send a message in a transaction, and return its id. `end`: commit, rollback, or None to leave the transaction
        open."""
        transaction = self._clients[name].begin_transaction()
        receipt = self._clients[name].send(made(**message), transaction)
        self._transactions[receipt.message_id] = transaction
        if end is not None:
            getattr(transaction, end)()
        return receipt.message_id

    def end_transaction(self, message_id, end):
        """End the open transaction of a message."""
        getattr(self._transactions[message_id], end)()

    def recall(self, name, topic, handle):
        return self._clients[name].recall_message(topic, handle)

    def receive(self, name, count=32, invisible_s=60):
        messages = self._clients[name].receive(count, invisible_s)
        self._received |= {one.receipt_handle: one for one in messages}
        return [shown(one) for one in messages]

    def ack(self, name, handle, other=None):
        """Acknowledge the message with a handle. `other`: the text to send as its handle."""
        message = self._received[handle]
        if other is not None:
            message.receipt_handle = other
        self._clients[name].ack(message)

    def change_invisible(self, name, handle, seconds):
        """Change the invisible time of a message. Returns its handle after the call."""
        message = self._received[handle]
        try:
            self._clients[name].change_invisible_duration(message, seconds)
        finally:
            self._received[message.receipt_handle] = message
        return message.receipt_handle

    def start_load(self, name, topic, prefix, pause_s, groups=0):
        """Send messages in the background until `end_load`, one after another, each with a text of its own.

        `groups`: the number of message groups, which send at the same time. The text of a message is then the group's
        number, a colon, and the message's number in the group.
        """
        stopped, sent, failed, counts = threading.Event(), [], [], [0] * max(groups, 1)

        def run(index):
            number = 0
            while not stopped.wait(pause_s):
                body, begin_ms = f"{index}:{number}" if groups else f"{prefix}-{number}", now_ms()
                number += 1
                try:
                    self._clients[name].send(made(topic, body, group=f"{prefix}-{index}" if groups else None))
                except Exception as error:
                    failed.append([body, begin_ms, now_ms(), repr(error)])
                else:
                    sent.append([body, begin_ms, now_ms()])
                    counts[index] += 1

        threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(counts))]
        for thread in threads:
            thread.start()
        self._loads[name] = stopped, threads, sent, failed, counts

    def load_counts(self, name):
        """Return how many messages of a load have been sent, for each message group."""
        return self._loads[name][-1]

    def end_load(self, name):
        stopped, threads, sent, failed, _ = self._loads.pop(name)
        stopped.set()
        until_s = time.monotonic() + LOAD_END_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return {"sent": sent, "failed": failed, "ended": not any(thread.is_alive() for thread in threads)}


def main():
    requests, writing = Requests(), threading.Lock()

    def answer(number, name, arguments):
        try:
            fields = {"result": getattr(requests, name)(**arguments)}
        except Exception as error:
            code = getattr(error, "code", None)
            # an error of gRPC has a method of this name
            fields = {
                "error": type(error).__name__,
                "code": code if isinstance(code, int) else None,
                "text": str(error),
            }
        with writing:
            print(json.dumps({"id": number, **fields}), flush=True)

    with ThreadPoolExecutor(REQUESTS_MAX) as threads:
        for line in sys.stdin:
            number, name, arguments = json.loads(line)
            threads.submit(answer, number, name, arguments)
        # clients and consumers have threads that would go on
        os._exit(0)


if __name__ == "__main__":
    main()
