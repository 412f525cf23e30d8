"""Tests of a program that uses Ray but not raymq's client: it sends and pulls messages through the actor handle of a
broker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import ray

import raymq
from raymq.common.message import MessageQueue
from tests.support.clusters.cluster import user_environment

ONLY_RAY = """
    import sys

    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("raymq", "storage", "actors", "placement", "raydp_jobs"):
                raise ModuleNotFoundError(f"No module named {name!r}")

    sys.meta_path.insert(0, Refuse())
"""
"""Text of a `sitecustomize` module with which Python refuses to import raymq, although raymq is installed."""

PROGRAM = """
    import json
    import sys

    import ray

    try:
        import raymq
    except ModuleNotFoundError:
        pass
    else:
        raise AssertionError("raymq is installed here")

    def kinds(value):
        inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        return {type(value).__name__}.union(*map(kinds, inner))

    address, topic = sys.argv[1:]
    ray.init(address, logging_level="error")
    broker = ray.get_actor("broker-a", namespace="raymq")
    sent = ray.get(broker.send.remote(topic, b"from plain Ray", tags="paid", keys=["o-17"]))
    place = {"queue_id": sent["queue_id"], "offset": sent["queue_offset"]}
    pulled = ray.get(broker.pull.remote("billing", topic, **place, max_messages=32))
    [message] = pulled["messages"]
    print(json.dumps([message["body"].decode(), message["tags"], message["keys"], place]))
    print(json.dumps(sorted(kinds(sent) | kinds(pulled))))

    @ray.remote(num_cpus=0)
    def send_from_a_task(number):
        there = ray.get_actor("broker-b", namespace="raymq")
        return ray.get(there.send.remote(topic, b"%d" % number))["queue_offset"]

    print(len(ray.get([send_from_a_task.remote(number) for number in range(3)])))
    for call in (
        lambda: broker.send.remote("nowhere", b"1"),
        lambda: broker.send.remote(topic, b""),
        lambda: broker.pull.remote("billing", topic, queue_id=place["queue_id"], offset=99),
        lambda: broker.pull.remote("billing", topic, queue_id=99, offset=0),
    ):
        try:
            ray.get(call())
        except (ValueError, RuntimeError) as error:
            builtin = [kind.__name__ for kind in (ValueError, RuntimeError) if isinstance(error, kind)]
            print(json.dumps([builtin, error.name, error.code, error.retryable]))
"""


def test_a_program_that_has_only_ray_sends_and_pulls(mq: raymq.Client, topic: str, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(dedent(ONLY_RAY))
    program = tmp_path / "plain.py"
    program.write_text(dedent(PROGRAM))
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, str(program), address, topic],
        cwd=tmp_path,
        env={**user_environment(), "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, kinds, count, *errors = [json.loads(line) for line in done.stdout.splitlines()]
    *message, place = first
    assert message == ["from plain Ray", "paid", ["o-17"]]
    assert set(kinds) <= {"dict", "list", "str", "int", "bytes", "NoneType"}
    [message] = mq.admin.pull(MessageQueue(topic, "broker-a", place["queue_id"]), place["offset"]).messages
    assert message.body == b"from plain Ray"
    assert count == 3
    messages = sum(entry.messages for entry in mq.admin.describe_topic(topic) if entry.queue.broker_name == "broker-b")
    assert messages == 3
    assert errors == [
        [["RuntimeError"], "TopicNotExistError", 17, False],
        [["ValueError"], "MessageIllegalError", 13, False],
        [["ValueError"], "OffsetOutOfRangeError", 21, False],
        [["ValueError"], "InvalidArgumentError", 29, False],
    ]
