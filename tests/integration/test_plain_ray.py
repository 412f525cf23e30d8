"""A program that knows nothing but Ray sends and pulls with the handle of a broker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import ray

import raymq
from raymq.message import MessageQueue
from tests.support.cluster import user_environment

PROGRAM = """
    import sys

    import ray

    address, topic = sys.argv[1:]
    ray.init(address, logging_level="error")
    assert not [name for name in sys.modules if name.startswith("raymq")]
    broker = ray.get_actor("broker-a", namespace="raymq")
    sent = ray.get(broker.send.remote(topic, b"from plain Ray", tags="paid", keys=["o-17"]))
    pulled = ray.get(
        broker.pull.remote("billing", topic, queue_id=sent.queue.queue_id, offset=sent.queue_offset, max_messages=32)
    )
    [message] = pulled.messages
    print(message.body.decode(), message.tags, message.keys, sent.queue.queue_id, sent.queue_offset)

    @ray.remote(num_cpus=0)
    def send_from_a_task(number):
        there = ray.get_actor("broker-b", namespace="raymq")
        return ray.get(there.send.remote(topic, b"%d" % number)).queue_offset

    print(len(ray.get([send_from_a_task.remote(number) for number in range(3)])))
    try:
        ray.get(broker.send.remote("nowhere", b"1"))
    except Exception as error:
        print(type(error).__name__, error.topic)
"""


def test_a_program_that_imports_only_ray_sends_and_pulls(mq: raymq.Client, topic: str, tmp_path: Path) -> None:
    program = tmp_path / "plain.py"
    program.write_text(dedent(PROGRAM))
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, str(program), address, topic],
        cwd=tmp_path,
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    text, queue_id, queue_offset = first.rsplit(" ", 2)
    assert text == "from plain Ray paid ('o-17',)"
    [message] = mq.admin.pull(MessageQueue(topic, "broker-a", int(queue_id)), int(queue_offset)).messages
    assert message.body == b"from plain Ray"
    assert second == "3"
    assert "TopicNotExistError" in third
    assert third.endswith("nowhere")
    messages = sum(entry.messages for entry in mq.admin.describe_topic(topic) if entry.queue.broker_name == "broker-b")
    assert messages == 3
