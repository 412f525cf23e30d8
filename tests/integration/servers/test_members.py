"""Tests of requests to live group members in a whole cluster: the examples of docs/members.md, the commands, and
members that leave."""

from __future__ import annotations

import json
import re

import pytest
from click.testing import CliRunner

import raymq
from raymq.common.errors import InvalidArgumentError
from raymq.common.members.questions import RunningInfo
from raymq.remoting import heartbeats
from raymq.tools.cli import cli
from tests.support.clusters.cluster import SERVER_SETTINGS, kill_actors
from tests.support.clusters.page_example import DOCS, run_program
from tests.support.history.waiting import eventually

SETTINGS = SERVER_SETTINGS
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
PAGE = (DOCS / "members.md").read_text()


def run(*words: str) -> dict[str, object]:
    """Run a raymq command with --json and return its decoded JSON output."""
    done = CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False)
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("program", "printed"), re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", PAGE, re.M | re.S)
)
def test_the_page_is_true(mq: raymq.Client, program: str, printed: str) -> None:
    assert run_program(program) == printed


def test_every_kind_of_consumer_answers(mq: raymq.Client) -> None:
    mq.admin.create_topic("asked", queues=2)
    with (
        mq.producer("askers") as producer,
        mq.pull_consumer("of-all-kinds") as pull,
        mq.simple_consumer("of-simple") as simple,
        mq.push_consumer("of-push", consume_from=FIRST).subscribe("asked").on_message(_take).start() as push,
    ):
        pull.subscribe("asked")
        simple.subscribe("asked")
        sent = producer.send(raymq.Message("asked", b"x", keys=["7"]))
        eventually(lambda: run("group", "connections", "of-all-kinds")["connections"], "the pull consumer is known")
        eventually(lambda: run("group", "connections", "of-push")["connections"], "the push consumer is known")
        eventually(lambda: run("group", "connections", "of-simple")["connections"], "the simple consumer is known")
        [row] = run("group", "connections", "of-all-kinds")["connections"]
        assert (row["type"], row["language"], row["subscriptions"]) == ("PULL", "PYTHON", {"asked": "*"})
        assert row["since"] is not None
        assert row["node"]

        [simply] = run("group", "running-info", "of-simple", "--stacks")["members"]
        assert (simply["consume_type"], simply["trouble"]) == ("POP", "")
        assert simply["stacks"]
        [pulled] = mq.admin.running_info("of-all-kinds", row["member"])
        assert pulled.subscriptions == {"asked": "*"}

        def has_consumed() -> RunningInfo | None:
            [info] = mq.admin.running_info("of-push", stacks=True)
            # `held`: the consumer's queues of the topic "asked". The consumer also has the queue of the group's retry
            # topic, which is left out.
            held = [one for one in info.queues if one.queue.topic == "asked"]
            return info if len(held) == 2 and info.consumed == 1 else None

        pushed = eventually(has_consumed, "the listener holds both queues and has consumed")
        assert (pushed.trouble, pushed.listener_pid > 0) == ("", True)
        assert pushed.stacks
        outcome = run("group", "consume-directly", "of-push", sent.message_id)
        assert (outcome["status"], outcome["error"]) == ("CONSUME_SUCCESS", "")
        [message] = mq.admin.query_by_id("asked", sent.message_id)
        with pytest.raises(InvalidArgumentError, match="only a push consumer has a listener"):
            mq.admin.consume_directly("of-simple", message)
        assert [one["group"] for one in run("producers", "askers")["producers"]] == ["askers"]
        assert push.status()
    eventually(lambda: not mq.admin.consumer_connections("of-all-kinds"), "its brokers know that it is closed")
    with pytest.raises(InvalidArgumentError, match="no connected member"):
        mq.admin.running_info("of-all-kinds", row["member"])


def test_members_are_asked_after_brokers_have_ended(mq: raymq.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "CLIENT_HEARTBEAT_INTERVAL_S", 1.0)
    mq.admin.create_topic("asked-again", queues=2)
    with mq.pull_consumer("asked-later") as consumer:
        consumer.subscribe("asked-again")
        eventually(lambda: mq.admin.consumer_connections("asked-later"), "the consumer is known")
        kill_actors("Broker")

        def answers() -> bool:
            try:
                infos = mq.admin.running_info("asked-later")
            except raymq.RaymqError:
                return False
            return [info.trouble for info in infos] == [""]

        eventually(answers, "the consumer answers again")


def _take(message: raymq.MessageExt) -> None:
    """A listener that consumes every message without an error."""
