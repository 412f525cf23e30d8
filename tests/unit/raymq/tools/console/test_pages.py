"""Tests of the console's pages about topics, groups and the cluster: their content, the changes that users make, and
the audit entries of the changes."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from typing import Any

import pytest

from raymq.common.errors import RequestTimeoutError, ServiceNotAvailableError, TopicNotExistError
from raymq.common.message import MessageQueue
from raymq.common.protocol.stats import GroupTotals
from raymq.common.protocol.status import Problem
from raymq.tools.console.web.history import ClusterFigures
from raymq.tools.console.web.lists import NO_ANSWER
from raymq.tools.console.web.texts import prose
from tests.support.console.asgi_client import Answer, AsgiClient
from tests.support.console.fake_cluster import NOW_MS, FakeCluster, members_of, topic_reading
from tests.support.console.logged_in import console_app, logged_in

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


def notices(answer: Answer) -> list[str]:
    return re.findall(r'<p class="notice (?:done|failed)[^>]*>(.*?)</p>', answer.text, re.DOTALL)


def after(client: AsgiClient, answer: Answer) -> Answer:
    """Follow the redirect in a response, and return the page to which it leads."""
    assert answer.status == 303, answer.text
    return client.get(answer.headers["location"])


@pytest.mark.parametrize(
    ("path", "texts"),
    [
        ("/", ["All is well", "billing", "1 min 35 s", "storage-broker-a-0"]),
        ("/topics", ["orders", "1\u202f204\u202f554", "812", "fifo"]),
        ("/topics/orders", ["broker-b:3", "billing", "storage-broker-a-0", "2026-11-23", "NORMAL"]),
        ("/groups", ["billing", "1\u202f520", "consuming", "off", "/groups/billing/dead-letters"]),
        ("/groups/billing", ["10.0.0.1@2", "ValueError: no such order", "orders: *", "Dead letters"]),
        ("/cluster", ["storage-broker-b-1", "nameserver-0", "clean shutdown", "2 of 2", "10.0.0.12"]),
    ],
)
def test_a_page_shows_data_of_the_cluster(admin: AsgiClient, viewer: AsgiClient, path: str, texts: list[str]):
    for client in (admin, viewer):
        answer = client.get(path)
        assert answer.status == 200
        assert [text for text in texts if text not in answer.text] == []


@pytest.mark.parametrize("path", ["/", "/topics", "/topics/orders", "/groups", "/groups/billing", "/cluster"])
def test_a_page_refreshes_its_figures_only(admin: AsgiClient, path: str):
    part = admin.get(path, {"hx-request": "true"})
    assert part.status == 200
    assert part.text.strip() in admin.get(path).text
    assert "<html" not in part.text
    assert "<form" not in part.text


@pytest.mark.parametrize("path", ["/topics", "/topics/orders", "/groups/billing", "/cluster"])
def test_a_viewer_sees_no_form_for_changes(admin: AsgiClient, viewer: AsgiClient, path: str):
    forms = re.compile(r'<form[^>]*action="(?!/logout)')
    assert forms.search(admin.get(path).text)
    assert not forms.search(viewer.get(path).text)


@pytest.mark.parametrize(("path", "call"), [("/", "cluster"), ("/topics", "readings"), ("/cluster", "cluster")])
def test_a_list_without_an_answer_is_a_line_and_not_a_blank_page(
    admin: AsgiClient, cluster: FakeCluster, path: str, call: str
):
    cluster.errors[call] = ServiceNotAvailableError("no broker is registered")
    answer = admin.get(path)
    assert answer.status == 200
    assert "No answer from the cluster: no broker is registered" in answer.text


@pytest.mark.parametrize(("path", "call"), [("/topics/orders", "topic_route"), ("/groups/billing", "group_summary")])
def test_a_page_without_an_answer_shows_the_reason(admin: AsgiClient, cluster: FakeCluster, path: str, call: str):
    cluster.errors[call] = RequestTimeoutError("broker-a", 5.0)
    answer = admin.get(path)
    assert answer.status == 503
    assert "Broker-a did not complete within 5 s" in answer.text
    del cluster.errors[call]
    assert admin.get(path).status == 200


def test_a_broker_that_is_missing_is_named_above_the_rows_of_the_others(admin: AsgiClient, cluster: FakeCluster):
    cluster.silent = {"broker-b"}
    for path in ("/topics", "/groups"):
        text = admin.get(path).text
        assert f"<strong>broker-b</strong>: no answer ({prose(NO_ANSWER)})" in text
    assert "orders" in admin.get("/topics").text


def test_a_missing_page_or_object_is_404(admin: AsgiClient):
    for path in ("/topics/nothing", "/groups/nothing", "/nothing", "/api/v1/topics/nothing"):
        assert admin.get(path).status == 404
    assert "does not exist" in admin.get("/api/v1/topics/nothing").json()["error"]


def test_a_command_in_an_error_is_shown_as_code(admin: AsgiClient, cluster: FakeCluster):
    error = TopicNotExistError("ord|<b>", ("orders",))
    for call, path in (
        ("topic_route", "/topics/orders"),
        ("browse", "/topics/orders/messages"),
        ("group_config", "/groups/billing"),
        ("dead_letters", "/groups/billing/dead-letters"),
        ("delayed", "/delayed"),
        ("query_by_key", "/messages?topic=orders&key=k3"),
        ("message_track", "/messages/track?topic=orders&offset=broker-a:0:3"),
    ):
        cluster.errors = {call: error}
        text = admin.get(path).text
        assert "does not exist; did you mean &#39;orders&#39;? Otherwise" in text, path
        assert "<code>raymq topic create &#39;ord|&lt;b&gt;&#39;</code>" in text, path
        assert "`" not in text, path


def test_hostile_names_and_errors_are_text(admin: AsgiClient, cluster: FakeCluster):
    cluster.topics[HOSTILE] = topic_reading(1, 1, 1.0)
    cluster.groups[HOSTILE], cluster.members[HOSTILE] = GroupTotals(lag=1), members_of(HOSTILE, HOSTILE, 1)
    cluster.problems = (Problem("masters", "fail", HOSTILE, HOSTILE, HOSTILE),)
    cluster.silent = {HOSTILE}
    for path in ("/", "/topics", "/groups", "/cluster", f"/topics/{'%3Cscript%3E'}"):
        text = admin.get(path).text
        assert "<script>alert" not in text
        assert "<img src=x" not in text
    assert "&lt;script&gt;alert(1)" in admin.get("/topics").text


def test_the_error_of_a_listener_is_harmless_and_short(admin: AsgiClient, cluster: FakeCluster):
    cluster.last_error = f"{HOSTILE}\u202e{'x' * 10_000}"
    text = admin.get("/groups/billing").text
    assert "<script>alert" not in text
    assert "\u202e" not in text
    assert "x" * 300 not in text
    assert "&lt;script&gt;alert(1)" in text


def test_a_topic_without_a_number_of_queues_gets_the_number_of_its_type(admin: AsgiClient, cluster: FakeCluster):
    page = after(admin, admin.post("/topics", {"topic": "new", "queues": "", "message_type": "priority"}))
    assert notices(page) == ["Topic new is created."]
    [(name, arguments)] = cluster.calls
    assert (name, arguments["queues"], arguments["message_type"]) == ("create_topic", None, "priority")


def test_a_topic_is_created_changed_and_deleted_and_the_audit_has_it_all(admin: AsgiClient, cluster: FakeCluster):
    page = after(admin, admin.post("/topics", {"topic": "new", "queues": "6", "retention": "12h"}))
    assert notices(page) == ["Topic new has 6 queues."]
    assert notices(admin.get("/topics/new")) == []
    after(admin, admin.post("/topics/new/update", {"queues": "8", "perm": "R", "retention": "0"}))
    after(admin, admin.post("/topics/new/order", {"config": "broker-a:4"}))
    refusal = after(admin, admin.post("/topics/new/delete", {"confirm": "old"}))
    assert notices(refusal) == ["Type the topic&#39;s name, new, to delete it."]
    assert "new" in cluster.topics
    gone = after(admin, admin.post("/topics/new/delete", {"confirm": "new"}))
    assert notices(gone) == ["Topic new is deleted."]
    assert [name for name, _ in cluster.calls] == ["create_topic", "update_topic", "set_order_config", "delete_topic"]
    assert cluster.calls[0][1]["reserve_time_s"] == 12 * 3600
    assert cluster.calls[1][1] == {
        "topic": "new",
        "queues": 8,
        "perm": 4,
        "message_type": None,
        "reserve_time_s": 0.0,
    }
    entries = cluster.audit_entries
    assert [entry.action for entry in entries] == ["topic create", "topic update", "topic order", "topic delete"]
    assert {(entry.who, entry.role, entry.address, entry.outcome) for entry in entries} == {
        ("Ada", "admin", "10.0.0.1", "done")
    }
    assert entries[1].arguments == {"topic": "new", "queues": "8", "perm": "4", "reserve_time_s": "0.0"}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"queues": "4"}, "The name is missing."),
        ({"topic": "new", "queues": "many"}, "Queues must be a whole number, 1 to 26624, not &#39;many&#39;"),
        ({"topic": "new", "queues": "0"}, "Queues must be 1 to 26624, not 0"),
        ({"topic": "new", "retention": "long"}, "&#39;long&#39; is not a length of time"),
        ({"topic": "a b", "queues": "4"}, "a b"),
        ({"topic": "orders", "queues": "4"}, "orders"),
    ],
)
def test_a_topic_that_cannot_be_created_is_a_line_above_the_form(
    admin: AsgiClient, cluster: FakeCluster, fields: dict[str, str], error: str
):
    [notice] = notices(after(admin, admin.post("/topics", fields)))
    assert error in notice
    assert cluster.calls == []


def test_a_change_that_fails_is_in_the_audit_with_its_error(admin: AsgiClient, cluster: FakeCluster):
    cluster.errors["delete_topic"] = ServiceNotAvailableError("broker-b is away")
    page = after(admin, admin.post("/topics/orders/delete", {"confirm": "orders"}))
    assert notices(page) == ["Broker-b is away."]
    assert [entry.outcome for entry in cluster.audit_entries] == ["broker-b is away"]


def test_a_change_missing_in_the_audit_log_is_reported(admin: AsgiClient, cluster: FakeCluster):
    cluster.errors["record_audit"] = ServiceNotAvailableError("no store takes it")
    page = after(admin, admin.post("/cluster/balance"))
    assert notices(page) == [
        "This change could not be written to the audit log: no store takes it",
        "The leads are being spread over the nodes.",
    ]


def test_a_reset_shows_old_and_new_offsets_and_changes_nothing_before_it_is_confirmed(
    admin: AsgiClient, cluster: FakeCluster
):
    preview = admin.get("/groups/billing/reset?topic=orders&to=earliest")
    assert preview.status == 200
    assert "120 messages consumed again" in preview.text
    assert "none yet" in preview.text
    assert cluster.calls == []
    hidden = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', preview.text))
    page = after(admin, admin.post("/groups/billing/reset", hidden))
    assert notices(page) == ["Group billing continues in topic orders to earliest."]
    [(name, arguments)] = cluster.calls
    assert (name, arguments["to"], arguments["topic"]) == ("reset_offsets", "earliest", "orders")
    assert cluster.audit_entries[0].action == "group reset-offset"


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ({"to": "latest"}, {"to": "latest"}),
        ({"to": "time", "time": "2026-11-23T02:13:20"}, {"timestamp_ms": NOW_MS}),
        ({"to": "time", "time": "2026-11-23T03:13:20+01:00"}, {"timestamp_ms": NOW_MS}),
        ({"to": "offset", "offset": "9007199254740993"}, {"offset": 9007199254740993}),
        ({"to": "latest", "queue": "broker-a:1"}, {"to": "latest", "queue": MessageQueue("orders", "broker-a", 1)}),
    ],
)
def test_a_reset_goes_to_an_end_a_time_or_an_offset(
    admin: AsgiClient, cluster: FakeCluster, query: dict[str, str], wanted: dict[str, Any]
):
    after(admin, admin.post("/groups/billing/reset", {"topic": "orders", **query}))
    [(_, arguments)] = cluster.calls
    assert {name: value for name, value in arguments.items() if value is not None} == {
        "group": "billing",
        "topic": "orders",
        **wanted,
    }


@pytest.mark.parametrize(
    "query",
    [
        "to=latest",
        "topic=orders",
        "topic=orders&to=time",
        "topic=orders&to=time&time=noon",
        "topic=orders&to=offset&offset=-1",
        "topic=orders&to=elsewhere",
        "topic=orders&to=latest&queue=3",
    ],
)
def test_a_reset_to_nowhere_is_a_line_on_the_groups_page(admin: AsgiClient, cluster: FakeCluster, query: str):
    assert len(notices(after(admin, admin.get(f"/groups/billing/reset?{query}")))) == 1
    assert "reset_offsets" not in cluster.asked


def test_offsets_are_copied_from_another_group_after_a_preview(admin: AsgiClient, cluster: FakeCluster):
    preview = admin.get("/groups/search/copy?topic=orders&source=billing")
    assert "480 messages left out" in preview.text
    after(admin, admin.post("/groups/search/copy", {"topic": "orders", "source": "billing"}))
    assert cluster.calls == [("clone_offsets", {"source": "billing", "target": "search", "topic": "orders"})]
    assert len(notices(after(admin, admin.get("/groups/search/copy?topic=orders&source=search")))) == 1


def test_a_group_is_switched_off_and_deleted(admin: AsgiClient, cluster: FakeCluster):
    page = after(admin, admin.post("/groups/billing/update", {"consume": "off", "retry_max_times": "3"}))
    assert "Consume is off" in page.text
    assert "10s, 30s, 1m" in page.text
    page = after(admin, admin.post("/groups/billing/update", {"retry_intervals": "5s,90s,1d"}))
    assert "5s, 90s, 1d</dd>" in page.text
    assert "in FIFO topics</dd>" in page.text
    after(admin, admin.post("/groups/billing/update", {"retry_intervals": "soon"}))
    after(admin, admin.post("/groups/billing/update", {"ordered": "perhaps"}))
    after(admin, admin.post("/groups/billing/update", {"ordered": "yes"}))
    page = after(admin, admin.post("/groups/billing/update", {"ordered": "by-topic"}))
    after(admin, admin.post("/groups/billing/update", {}))
    after(admin, admin.post("/groups/billing/delete", {"confirm": "no"}))
    assert "billing" in cluster.groups
    after(admin, admin.post("/groups/billing/delete", {"confirm": "billing", "dead_letters": "on"}))
    assert cluster.calls == [
        ("update_group", {"group": "billing", "consume_enable": False, "retry_max_times": 3}),
        ("update_group", {"group": "billing", "retry_intervals_s": (5.0, 90.0, 86_400.0)}),
        ("update_group", {"group": "billing", "ordered": True}),
        ("update_group", {"group": "billing", "ordered": None}),
        ("delete_group", {"group": "billing", "dead_letters": True}),
    ]


def test_the_cluster_is_drained_only_when_confirmed(admin: AsgiClient, cluster: FakeCluster):
    after(admin, admin.post("/cluster/drain", {"node": "10.0.0.11"}))
    assert cluster.calls == []
    after(admin, admin.post("/cluster/drain", {"node": "10.0.0.11", "confirm": "on"}))
    after(admin, admin.post("/cluster/drain", {"node": "10.0.0.11", "undo": "on"}))
    after(admin, admin.post("/cluster/clean", {"broker": "broker-a"}))
    page = after(admin, admin.post("/cluster/write-permission", {"broker": "broker-a", "write": "off"}))
    assert "Give writes back" in page.text
    after(admin, admin.post("/cluster/write-permission", {"broker": "broker-a", "write": "perhaps"}))
    assert cluster.calls == [
        ("drain", {"node": "10.0.0.11", "drained": True}),
        ("drain", {"node": "10.0.0.11", "drained": False}),
        ("clean_store", {"broker_name": "broker-a"}),
        ("wipe_write_perm", {"broker_name": "broker-a"}),
    ]


def test_the_json_is_that_of_the_commands(admin: AsgiClient):
    assert admin.get("/api/v1/topics").json() == {
        "topics": ["audit-log", "orders", "payments"],
        "attributes": {"orders": {"message.type": "NORMAL"}, "payments": {"message.type": "FIFO"}},
    }
    queue = admin.get("/api/v1/topics/orders").json()["queues"][0]
    assert list(queue) == ["broker", "queue", "min_offset", "max_offset", "messages"]
    assert admin.get("/api/v1/groups").json() == {"groups": ["billing", "reports", "search"]}
    group = admin.get("/api/v1/groups/billing").json()
    assert list(group) == ["queues", "lag", "lag_ms", "retry_lag", "dead_letters"]
    names = ["topic", "broker", "queue", "committed", "max_offset", "lag", "in_flight", "lag_ms"]
    assert list(group["queues"][0]) == names
    member = admin.get("/api/v1/groups/billing/members").json()["members"][0]
    names = ["client", "member", "host", "pid", "language", "version", "type", "mode", "model", "silent_s"]
    assert list(member) == names


def test_rates_are_columns_for_a_chart(cluster: FakeCluster):
    app = console_app(cluster)
    client = logged_in(app)
    for figures in (
        ClusterFigures(0, 0, 0, 0),
        ClusterFigures(10_000, 50, 20, 1000),
        ClusterFigures(20_000, 10, 30, 2000),
    ):
        app_console(app).history.add(figures)
    assert client.get("/api/v1/rates").json() == {
        "at_s": [10.0, 20.0],
        "messages_in": [5.0, None],
        "messages_out": [2.0, 1.0],
        "bytes_in": [100.0, 100.0],
    }
    client.close()


def test_topics_have_a_line_and_groups_a_chart_of_the_last_hour(cluster: FakeCluster):
    app = console_app(cluster)
    client = logged_in(app)
    assert "<polyline" not in client.get("/topics").text
    for n, lag in enumerate((5, 9, 2)):
        topics, groups = {"orders": n * n * 100}, {"billing": lag} if n else {}
        app_console(app).history.add(ClusterFigures(n * 10_000, n, n, n, topic_messages=topics, group_lags=groups))
    app_console(app)._sparklines.clear()  # clear the cached charts, as the console does for each new sample
    text = client.get("/topics").text
    assert text.count("<polyline") == 1
    assert '<polyline points="0,13 90,1">' in text
    assert 'data-chart="/api/v1/groups/billing/lag"' in client.get("/groups/billing").text
    app_console(app).history.add(ClusterFigures(30_000, 3, 3, 3, group_lags={"billing": 7}))
    assert client.get("/api/v1/groups/billing/lag").json() == {
        "at_s": [10.0, 20.0, 30.0],
        "lag": [9, 2, 7],
    }
    assert client.get("/api/v1/groups/none/lag").json() == {"at_s": [], "lag": []}
    client.close()


def app_console(app: Any) -> Any:
    return app._app.state.console


def test_tables_are_saved_as_files(admin: AsgiClient, cluster: FakeCluster):
    cluster.groups["=cmd()"] = GroupTotals()
    answer = admin.get("/export/groups?format=csv")
    assert answer.headers["content-disposition"] == 'attachment; filename="groups.csv"'
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["group"] for row in rows] == ["'=cmd()", "billing", "reports", "search"]
    assert len(admin.get("/export/topics?format=json").text.splitlines()) == 3
    assert admin.get("/export/topics?format=xml").status == 400


def test_a_thousand_topics_and_two_thousand_groups_are_a_page_each(admin: AsgiClient, cluster: FakeCluster):
    cluster.topics = {f"t{n}": topic_reading(8, n, 1.0) for n in range(1_000)}
    cluster.groups = {f"g{n}": GroupTotals(lag=n, lag_ms=n) for n in range(2_000)}
    for path, rows in (("/topics", 1_000), ("/groups", 2_000), ("/", 5)):
        text = admin.get(path).text
        assert text.count('<th scope="row"><a') == rows
    counts = Counter(cluster.asked)
    assert (counts["readings"], counts["topic_attributes"], counts["consumer_connections"]) == (2, 1, 1)
