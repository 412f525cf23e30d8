"""Tests of web hooks at the ends of tasks, on a cluster with the gateway's actor: a receiver that refuses at first,
and a gateway that is killed."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import raymq
from raymq.common.names import WEBHOOK_GROUP
from raymq.common.protocol.group import GroupConfig
from raymq.serve.states import StateRecord, TaskState
from raymq.serve.task_messages import state_message
from tests.support.gateway.gateways import HOST, RESTART_S, RunningGateway, running_gateway
from tests.support.gateway.webhook_receiver import WebhookReceiver, send_task, webhook_receiver
from tests.support.history.waiting import eventually
from tests.support.ports import free_port

ANSWER_S = 120.0
KEY = b"a key of more than 16 bytes"


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    with webhook_receiver() as found:
        yield found


class Tasks:
    """Sends tasks of a namespace to a gateway over HTTP, and ends them as a replica does."""

    def __init__(
        self, mq: raymq.Client, producer: raymq.Producer, http_port: int, queue: str, namespace: str = ""
    ) -> None:
        self._producer, self._queue = producer, queue
        self._http, self._namespace = f"{HOST}:{http_port}", namespace
        stored = f"{namespace}%{queue}" if namespace else queue
        self._results = f"{stored}-results"
        for topic in (stored, self._results):
            mq.admin.create_topic(topic, queues=4)

    def send(self, **more: str) -> str:
        """Send a task, and return its id."""
        headers = {"x-mq-namespace": self._namespace}
        status, task = send_task(self._http, self._queue, headers, name="resize", **more)
        assert status == 202, task
        return str(task["id"])

    def end(self, task: str, state: TaskState = TaskState.SUCCESS, result: object = "done") -> None:
        record = StateRecord(task, state, 1_795_400_000.0, 1_795_399_000.0, 0, result, "replica-1")
        self._producer.send(state_message(self._results, record, record.encode()), sharding_key=task)


@pytest.fixture
def producer(mq: raymq.Client) -> Iterator[raymq.Producer]:
    with mq.producer("webhook-replica", send_timeout_s=30.0) as found:
        yield found


@pytest.fixture
def gateway(mq: raymq.Client, tmp_path: Path) -> Iterator[tuple[RunningGateway, int]]:
    """Start a gateway that may call this machine, and yield it with its port of HTTP. An operator has set short
    retry intervals."""
    mq.admin.create_group(GroupConfig(WEBHOOK_GROUP, retry_max_times=3, retry_intervals_s=(0.1,)))
    (tmp_path / "key").write_bytes(KEY)
    port = free_port()
    options = f', http_port: {port}, webhook_hosts: ["http://{HOST}"], webhook_secret: {tmp_path / "key"}'
    with running_gateway(tmp_path, options) as found:
        yield found, port


def test_a_web_hook_that_fails_twice_is_called_until_it_accepts(
    mq: raymq.Client, producer: raymq.Producer, gateway: tuple[RunningGateway, int], receiver: WebhookReceiver
) -> None:
    tasks = Tasks(mq, producer, gateway[1], "hook-jobs")
    tasks.end("before", result="ended before any task had a web hook")
    task, other = tasks.send(webhook=receiver.url), tasks.send()
    receiver.statuses = [500, 302]
    tasks.end(other)
    tasks.end(task, TaskState.RETRY, "not yet")
    tasks.end(task, result={"bytes": 9})
    eventually(lambda: len(receiver.of(task)) >= 3, "the call that is accepted", ANSWER_S)
    calls = receiver.of(task)
    assert {headers["webhook-id"] for headers, _ in calls} == {f"{task}-SUCCESS-1795400000000"}
    assert all(data["result"] == {"bytes": 9} and data["queue"] == "hook-jobs" for _, data in calls)
    headers, body = receiver.calls[-1]
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    signature = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{signature}"
    # a web hook that never accepts is a dead letter with the reason, and a replay calls the web hook again
    lost = tasks.send(webhook=receiver.url)
    receiver.statuses = [503] * 100
    tasks.end(lost, TaskState.FAILURE, "no memory")
    letters = mq.admin.dead_letters(WEBHOOK_GROUP)
    [letter] = eventually(letters.letters, "the dead letter", ANSWER_S)
    assert "status 503" in letter.reason
    refused = len(receiver.of(lost))
    assert refused >= 4, "a call and three retries"
    receiver.statuses = []
    assert [one.error for one in letters.replay()] == [""]
    eventually(lambda: len(receiver.of(lost)) > refused, "the call of the replayed dead letter", ANSWER_S)
    assert receiver.of(lost)[-1][1]["state"] == "FAILURE"
    apart = Tasks(mq, producer, gateway[1], "hook-jobs", "hook-team")
    foreign = apart.send(webhook=receiver.url)
    apart.end(foreign, TaskState.REVOKED, None)
    eventually(lambda: receiver.of(foreign), "the call about a task of a namespace", ANSWER_S)
    # every end is settled, and no other task was reported
    eventually(lambda: mq.admin.group_summary(WEBHOOK_GROUP).lag == 0, "the end of all deliveries", ANSWER_S)
    assert {json.loads(body)["data"]["id"] for _, body in receiver.calls} == {task, lost, foreign}


@pytest.mark.long
def test_a_killed_gateway_loses_no_web_hook(
    mq: raymq.Client, producer: raymq.Producer, gateway: tuple[RunningGateway, int], receiver: WebhookReceiver
) -> None:
    running, port = gateway
    tasks = Tasks(mq, producer, port, "hook-killed")
    before, during = tasks.send(webhook=receiver.url), tasks.send(webhook=receiver.url)
    receiver.silent = {before}
    tasks.end(before)
    eventually(lambda: receiver.of(before), "the call that gets no answer", ANSWER_S)
    killed = running.pid()
    os.kill(killed, signal.SIGKILL)
    tasks.end(during)  # no gateway lives
    eventually(lambda: running.pid() not in (0, killed), "another gateway process", RESTART_S)
    eventually(lambda: receiver.of(during), "the call about the end without a gateway", ANSWER_S)
    eventually(lambda: len(receiver.of(before)) >= 2, "the repeated call, after its lease", ANSWER_S)
    assert len({headers["webhook-id"] for headers, _ in receiver.of(before)}) == 1
    eventually(lambda: mq.admin.group_summary(WEBHOOK_GROUP).lag == 0, "the end of all deliveries", ANSWER_S)
