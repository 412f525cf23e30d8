"""Tests of the command `raymq` as users run it: tables for people, JSON for programs, exit codes for scripts."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

import raymq
from tests.support.clusters.cluster import Sandbox, poll_until, user_environment
from tests.support.clusters.commands import run_here
from tests.support.history.waiting import eventually

RAYMQ = str(Path(sys.executable).with_name("raymq"))
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET


class Cli:
    """Runs `raymq` commands against the test module's cluster.

    `alone` runs a command in its own process, as a user does. Each command family has a test that uses it. The other
    methods run commands in the test's process.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._address = ray.get_runtime_context().gcs_address

    def alone(self, *arguments: str, stdin: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run one `raymq` command in its own process, and check it as `run` does."""
        done = subprocess.run(
            [RAYMQ, *arguments, "--address", self._address],
            input=stdin,
            cwd=self._directory,
            env={**user_environment(), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return checked(done, code)

    def run(self, *arguments: str, stdin: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run one `raymq` command and check that its exit code is `code`. With code 0, its standard error must be
        empty."""
        done = run_here(*arguments, "--address", self._address, stdin=stdin, directory=self._directory, COLUMNS="200")
        return checked(done, code)

    def rows(self, *arguments: str, stdin: str = "") -> list[list[str]]:
        """Run a `raymq` command that prints a table. Returns the table's cells, as `cells` does."""
        return cells(self.run(*arguments, stdin=stdin).stdout)

    def json(self, *arguments: str, stdin: str = "") -> Any:
        return json.loads(self.run(*arguments, "--json", stdin=stdin).stdout)

    def refused(self, *arguments: str, stdin: str = "", code: int = 1) -> str:
        """Run a `raymq` command that must fail. Returns the single line of its standard error."""
        return only_line(self.run(*arguments, stdin=stdin, code=code))


def checked(done: subprocess.CompletedProcess[str], code: int) -> subprocess.CompletedProcess[str]:
    assert done.returncode == code, done.stderr
    assert code or done.stderr == ""
    return done


def cells(printed: str) -> list[list[str]]:
    """Return the cells of a printed table, row by row, beginning with the header row."""
    rows = [re.split(r"[│┃]", line)[1:-1] for line in printed.splitlines()]
    return [[cell.strip() for cell in row] for row in rows if row]


def only_line(refused: subprocess.CompletedProcess[str]) -> str:
    """Return the single line of standard error of a command that printed nothing else."""
    assert refused.stdout == ""
    [line] = refused.stderr.splitlines()
    return line


@pytest.fixture(scope="module")
def cli(mq: raymq.Client, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli(tmp_path_factory.mktemp("cli"))


def test_a_topic_is_created_listed_described_and_deleted(cli: Cli) -> None:
    assert cli.alone("topic", "create", "orders", "--queues", "3").stdout == "topic orders has 3 queues\n"
    created = cli.json("topic", "create", "orders", "--queues", "3")
    assert created == {"topic": "orders", "queues": 3, "attributes": {}}
    assert "orders" in cli.json("topic", "list")["topics"]
    assert "orders" in [row[0] for row in cells(cli.alone("topic", "list").stdout)]
    cli.run("send", "orders", "one")
    described = cli.json("topic", "describe", "orders")["queues"]
    assert [(row["broker"], row["queue"]) for row in described] == [("broker-a", 0), ("broker-a", 1), ("broker-b", 0)]
    assert sum(row["messages"] for row in described) == 1
    table = cli.rows("topic", "describe", "orders")
    assert table[0] == ["broker", "queue", "min_offset", "max_offset", "messages"]
    assert table[-1] == ["total", "", "", "", "1"]
    assert cli.run("topic", "delete", "orders", "--yes").stdout == "topic orders is deleted\n"
    typed = cli.json("topic", "create", "typed", "--type", "fifo", "--retention", "12h")
    assert typed["attributes"] == {"message.type": "FIFO", "reserve.time": "43200000"}
    listed = cli.json("topic", "list")
    assert "orders" not in listed["topics"]
    assert listed["attributes"]["typed"] == typed["attributes"]


LINES = "first\nsecond\n\nlast without an end"


def test_a_body_or_each_line_of_standard_input_is_sent(cli: Cli, mq: raymq.Client, topic: str) -> None:
    options = ["--tags", "paid", "--key", "o-17", "--key", "c-3", "--property", "shop=Zürich", "--sharding-key", "k"]
    [one] = cli.json("send", topic, "été", *options)["sent"]
    assert (one["offset"], one["status"]) == (0, "SEND_OK")
    lines = json.loads(cli.alone("send", topic, "--sharding-key", "k", "--json", stdin=LINES).stdout)["sent"]
    assert [(row["queue"], row["offset"]) for row in lines] == [(one["queue"], offset) for offset in (1, 2, 3)]
    table = cli.rows("send", topic, "in a table")
    assert table[0] == ["queue", "offset", "message_id", "status"]
    assert table[1][3] == "SEND_OK"
    _, _, place = one["queue"].partition("@")
    shown = cli.json("query", topic, "--offset", f"{place}:0")
    assert (shown["body"], shown["tags"], shown["keys"]) == ("été", "paid", ["o-17", "c-3"])
    assert (shown["properties"], shown["message_id"]) == ({"shop": "Zürich"}, one["message_id"])
    assert ["body", "last without an end"] in cells(cli.alone("query", topic, "--offset", f"{place}:3").stdout)


def test_a_group_consumes_commits_and_is_described(cli: Cli, topic: str) -> None:
    cli.run("send", topic, stdin="".join(f"{number}\n" for number in range(20)))
    some = cli.run("consume", "cli-group", topic, "--max", "15", "--from", "first").stdout.splitlines()
    assert len(some) == 15
    assert re.fullmatch(r"broker-[ab]:\d:\d+  -  \d+", some[0])
    rest = cli.alone("consume", "cli-group", topic, "--timeout", "1", "--json").stdout.splitlines()
    bodies = [line.rsplit(" ", 1)[1] for line in some] + [json.loads(line)["body"] for line in rest]
    assert sorted(map(int, bodies)) == list(range(20))
    assert cli.run("consume", "cli-group", topic, "--timeout", "0.5").stdout == ""
    assert "cli-group" in cli.json("group", "list")["groups"]
    queues = json.loads(cli.alone("group", "describe", "cli-group", "--json").stdout)["queues"]
    assert sum(row["committed"] or 0 for row in queues) == 20
    assert sum(row["lag"] for row in queues) == 0
    table = cli.rows("group", "describe", "cli-group")
    assert table[0] == ["topic", "broker", "queue", "committed", "max_offset", "lag", "in_flight", "behind"]
    assert table[-1][-2:] == ["0", "0 s"]
    assert cli.run("group", "delete", "cli-group", "--yes").stdout == "group cli-group is deleted\n"
    assert "cli-group" not in cli.json("group", "list")["groups"]


def test_consume_takes_only_the_tags_asked_for(cli: Cli, topic: str) -> None:
    for tag in ("paid", "refunded", "late"):
        cli.run("send", topic, f"it is {tag}", "--tags", tag)
    options = ["--tags", "paid || late", "--from", "first", "--timeout", "1"]
    lines = cli.run("consume", "cli-tags", topic, *options).stdout.splitlines()
    assert sorted(line.partition("  ")[2] for line in lines) == ["late  it is late", "paid  it is paid"]


def test_status_shows_brokers_stores_and_connected_groups(cli: Cli, mq: raymq.Client, topic: str) -> None:
    push = mq.push_consumer("cli-status", consume_from=FIRST).subscribe(topic).on_message(print)
    with push.start() as subscription:
        eventually(lambda: len(subscription.queues()) == 6, "its queues, two of the retry topic among them")
        report = json.loads(cli.alone("status", "--json").stdout)
        text = cli.alone("status").stdout
    assert [broker["actor"] for broker in report["brokers"]] == ["broker-a", "broker-b"]
    assert all(broker["ready"] and not broker["error"] for broker in report["brokers"])
    assert [store["actor"] for store in report["stores"]] == ["storage-broker-a-0", "storage-broker-b-0"]
    assert all(store["writable"] for store in report["stores"])
    [group] = [group for group in report["groups"] if group["group"] == "cli-status"]
    assert [member["member"] for member in group["members"]] == ["pull-cli-status-0"]
    assert [(one["instance"], len(one["holding"])) for one in report["instances"]] == [("pull-cli-status-0", 6)]
    for words in ("broker-a", "ready", "storage-broker-b-0", "writable", "cli-status", "pull-cli-status-0"):
        assert words in text


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["topic", "describe", "nowhere"], "topic 'nowhere' does not exist; create it"),
        (["topic", "create", "two words"], "topic name 'two words' is not legal"),
        (["send", "nowhere", "1"], "topic 'nowhere' does not exist; create it"),
        (["consume", "g", "nowhere"], "topic 'nowhere' does not exist; create it"),
        (["group", "describe", "nobody"], "consumer group 'nobody' does not exist"),
        (["query", "nowhere", "--offset", "broker-a:0:0"], "topic 'nowhere' does not exist; create it"),
    ],
)
def test_a_refused_command_prints_one_line_and_exits_with_1(cli: Cli, arguments: list[str], why: str) -> None:
    line = cli.refused(*arguments)
    assert line.startswith("raymq: ")
    assert why in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["topic", "create"],
        ["no-such-command"],
        ["topic", "list", "--colour"],
        ["topic", "create", "t", "--queues", "0"],
        ["send", "orders", "1", "--property", "no-value"],
        ["send", "orders", "1", "--key", "caf\udce9"],
    ],
)
def test_wrong_usage_is_exit_code_2(cli: Cli, arguments: list[str]) -> None:
    assert "Usage: " in cli.run(*arguments, code=2).stderr


def test_a_command_in_its_own_process_ends_with_1_or_2(cli: Cli) -> None:
    assert "topic 'nowhere' does not exist; create it" in only_line(cli.alone("topic", "describe", "nowhere", code=1))
    assert "Usage: " in cli.alone("send", "orders", "1", "--key", "caf\udce9", code=2).stderr


def test_the_error_for_an_offset_without_a_message_has_the_queues_offsets(cli: Cli, topic: str) -> None:
    assert "the queue's next offset is 0" in cli.refused("query", topic, "--offset", "broker-a:0:0")
    assert "has offsets 0 to 0" in cli.refused("query", topic, "--offset", "broker-a:0:7")


def test_a_group_without_dead_letters_lists_none_and_an_unknown_group_is_named(cli: Cli, topic: str) -> None:
    cli.json("group", "create", "no-letters", "--retry-max-times", "3")
    assert json.loads(cli.alone("dlq", "list", "no-letters", "--json").stdout) == {"dead_letters": []}
    assert cli.run("dlq", "replay", "no-letters").stdout == "0 replayed, 0 failed\n"
    found = json.loads(cli.alone("job", "dead-letters", "no-letters", "--json").stdout)
    assert found["groups"][0]["dead_letters"] == 0
    for command in (("dlq", "list"), ("dlq", "replay"), ("group", "describe"), ("job", "dead-letters")):
        refused = (
            only_line(cli.alone(*command, "no-leters", code=1))
            if command[0] == "job"
            else cli.refused(*command, "no-leters")
        )
        assert "group 'no-leters' does not exist; did you mean 'no-letters'?" in refused
        assert refused.index("no-letters") < refused.index("raymq group create no-leters")


def test_an_unknown_topic_is_refused_with_the_nearest_topic_first(cli: Cli, mq: raymq.Client) -> None:
    mq.admin.create_topic("parcels", 1)
    for command in (
        ("topic", "describe", "parcls"),
        ("topic", "stats", "parcls"),
        ("topic", "delete", "parcls", "--yes"),
        ("topic", "order", "parcls"),
        ("send", "parcls", "1"),
        ("consume", "near-g", "parcls", "--max", "1"),
        ("receive", "near-g", "parcls"),
        ("browse", "parcls"),
        ("query", "parcls", "--key", "k"),
        ("track", "parcls", "0A000001000000000000000000000017"),
        ("group", "reset-offset", "near-g", "parcls", "--to", "earliest"),
        ("replay", "parcls", "--key", "k", "--to-topic", "parcels"),
        ("check", "send", "--topic", "parcls"),
    ):
        refused = cli.refused(*command)
        assert "topic 'parcls' does not exist; did you mean 'parcels'?" in refused, command
        assert refused.index("'parcels'") < refused.index("raymq topic create parcls")
    assert "broker group 'broker-c' does not exist; did you mean" in cli.refused("store", "stats", "broker-c")


def test_ctrl_c_ends_consume_with_130_and_everything_printed_is_committed(
    cli: Cli, mq: raymq.Client, topic: str
) -> None:
    cli.run("send", topic, "before ctrl-C")
    address = ray.get_runtime_context().gcs_address
    command = [RAYMQ, "consume", "cli-ctrl-c", topic, "--from", "first", "--address", address]
    consume = subprocess.Popen(
        command, env=user_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with consume:
        try:
            assert consume.stdout is not None
            assert "before ctrl-C" in consume.stdout.readline()
            eventually(lambda: sum(e.committed or 0 for e in mq.admin.describe_group("cli-ctrl-c")) == 1, "the commit")
            consume.send_signal(signal.SIGINT)
            _, errors = consume.communicate(timeout=60)
        finally:
            consume.kill()
    assert consume.returncode == 130
    assert errors.split() == ["raymq:", "interrupted"]
    with mq.producer() as producer:
        producer.send(raymq.Message(topic, b"after"))
    with mq.pull_consumer("cli-ctrl-c") as consumer:
        consumer.subscribe(topic)
        assert [message.body for message in poll_until(consumer, 1)] == [b"after"]


def test_the_doctor_looks_at_the_machine_the_node_the_cluster_and_its_groups(
    cli: Cli, mq: raymq.Client, box: Sandbox, topic: str
) -> None:
    with mq.producer() as producer, mq.pull_consumer("cli-forsaken", consume_from=FIRST) as consumer:
        producer.send(raymq.Message(topic, b"one"))
        consumer.subscribe(topic)
        assert len(poll_until(consumer, 1)) == 1
        consumer.commit()
        producer.send(raymq.Message(topic, b"two"))
    answer = json.loads(cli.alone("doctor", "--json").stdout)
    found = {one["check"]: one for one in answer["findings"]}
    assert {one["check"] for one in answer["findings"] if one["state"] == "skip"} == {"alert rules"}
    assert {one["check"] for one in answer["findings"] if one["state"] == "fail"} == set()
    places = {one["where"] for one in answer["findings"] if one["check"] == "versions"}
    # The doctor checks the installed versions in two places: in this process, and in a task on the cluster's only node.
    assert len(places) == 2
    assert str(box.data) in found["private files"]["seen"]
    assert found["locks"]["seen"] == f"{box.data}: 2 stores are open"
    assert found["lanes"]["state"] == "ok"
    assert found["copies"]["state"] == "warn"
    forsaken = [one for one in answer["findings"] if one["check"] == "groups have members"]
    assert "cli-forsaken" in [one["where"] for one in forsaken]


def test_top_shows_topics_and_groups_of_all_brokers(cli: Cli, mq: raymq.Client, topic: str) -> None:
    with mq.producer() as producer, mq.pull_consumer("cli-top", consume_from=FIRST) as consumer:
        for number in range(20):
            producer.send(raymq.Message(topic, b"%d" % number))
        consumer.subscribe(topic)
        poll_until(consumer, 20)
        consumer.commit()
        for _ in range(7):
            producer.send(raymq.Message(topic, b"unread"))
    answer = cli.json("top", "--once", "--interval", "0.5")
    [group] = [row for row in answer["groups"] if row["group"] == "cli-top"]
    assert (group["topic"], group["lag"]) == (topic, 7)
    assert group["behind_ms"] > 0
    assert [row["lag"] for row in answer["topics"] if row["topic"] == topic] == [7]
    assert (answer["silent"], answer["left_out"]) == ([], 0)
    readings = mq.admin.readings()
    assert sum(one.topics[topic].messages for one in readings.values() if one is not None) == 27
    assert sum(one.groups["cli-top", topic].consumed for one in readings.values() if one is not None) == 20
    assert topic in [row[0] for row in cells(cli.alone("top", "--once", "--interval", "0.5").stdout)]


def left_of_bench(mq: raymq.Client) -> list[str]:
    """Return the topics and groups of `raymq bench` that exist now."""
    names = [*mq.admin.list_topics(internal=True), *mq.admin.list_groups()]
    return [name for name in names if "raymq-bench" in name]


def test_bench_measures_all_phases_and_deletes_its_topic(cli: Cli, mq: raymq.Client, box: Sandbox) -> None:
    options = ("--messages", "60", "--rate", "300/s", "--producers", "2", "--consumers", "2", "--batch", "25")
    found = json.loads(cli.alone("bench", *options, "--size", "200", "--json").stdout)
    phases = found["phases"]
    assert list(phases) == ["publish", "batch", "consume", "receive", "delay"]
    assert [phases[name]["messages"] for name in ("publish", "batch", "delay")] == [60, 60, 60]
    assert phases["consume"]["messages"] == 120
    assert phases["receive"]["messages"] == 120
    for name in ("publish", "batch", "delay"):
        times = [phases[name][key] for key in ("p50_ms", "p99_ms", "p999_ms", "max_ms")]
        assert times == sorted(times)
        assert times[0] > 0
    assert [(one["broker"], one["replicas"], one["local"]) for one in found["brokers"]] == [
        ("broker-a", 1, True),
        ("broker-b", 1, True),
    ]
    assert {one["flush"] for one in found["brokers"]} <= {"SYNC_FLUSH", "ASYNC_FLUSH"}, found["brokers"]
    [disk] = found["disks"]
    assert disk["directory"].startswith(str(box.data))
    assert (disk["error"], disk["write_bytes_per_s"] > 0) == ("", True)
    assert (found["errors"], found["left"]) == ([], [])
    assert found["topic"].startswith("raymq-bench-")
    assert left_of_bench(mq) == []


def test_bench_on_a_topic_of_the_user_keeps_the_topic(cli: Cli, mq: raymq.Client, topic: str) -> None:
    with mq.producer() as producer:
        producer.send(raymq.Message(topic, b"of the user"))
    table = cli.rows("bench", "--topic", topic, "--messages", "10", "--rate", "200/s")
    assert [row[:2] for row in table[1:]] == [
        ["send one by one", "10"],
        ["send batches", "10"],
        ["poll and commit", "20"],
        ["receive and acknowledge", table[4][1]],
        ["delay from send to poll", "10"],
    ]
    assert sum(queue.messages for queue in mq.admin.describe_topic(topic)) == 31
    assert left_of_bench(mq) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupted_bench_deletes_its_topic(mq: raymq.Client, number: signal.Signals) -> None:
    address = ray.get_runtime_context().gcs_address
    command = [RAYMQ, "bench", "--seconds", "600", "--rate", "20/s", "--json", "--address", address]
    bench = subprocess.Popen(command, env=user_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def has_sent() -> bool:
        topics = [name for name in mq.admin.list_topics() if "raymq-bench" in name]
        return any(queue.messages for name in topics for queue in mq.admin.describe_topic(name))

    with bench:
        try:
            eventually(has_sent, "the bench sends")
            bench.send_signal(number)
            printed, errors = bench.communicate(timeout=120)
        finally:
            bench.kill()
    assert bench.returncode != 0
    assert printed == ""
    if number == signal.SIGINT:
        assert (bench.returncode, errors.split()) == (130, ["raymq:", "interrupted"])
    assert left_of_bench(mq) == []
