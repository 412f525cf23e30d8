"""Tests of the console's pages about messages: responses, files, changes and the rights that they need. tests/console
tests the pages in a browser."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from raymq.client.admin.dead_letters import DeadLetter, LetterPlace
from raymq.common.errors import RequestTimeoutError
from raymq.common.message import Message
from raymq.common.protocol.recall import RecallHandle
from raymq.tools.console.messages.body import BODY_SHOWN_MAX_BYTES
from tests.support.console.asgi_client import AsgiClient
from tests.support.console.fake_cluster import FakeCluster, fake_message
from tests.support.console.logged_in import VIEWER_TOKEN, console_app, logged_in
from tests.support.history.waiting import eventually

ONE = "/messages?topic=orders&offset=broker-a:0:3"
LETTERS = "/groups/billing/dead-letters"
SECRET = b"secret-4711"


@pytest.mark.parametrize(
    ("path", "texts"),
    [
        ("/topics/orders/messages", ["50 messages, 50 scanned", "truncated", "Go on", "broker-a:1:29", "k59"]),
        ("/topics/orders/messages?start=earliest&limit=100", ["60 messages, 60 scanned", "broker-a:0:0"]),
        ("/topics/orders/messages?start=offset", ["choose a queue"]),
        ("/messages", ["Find messages"]),
        ("/messages?topic=orders", ["one of key, id and place"]),
        ("/messages?topic=orders&key=nothing", ["0 messages found"]),
        ("/messages?topic=orders&key=k3", ["Message broker-a:1:1"]),
        ("/messages?topic=nothing&key=k3", ["nothing"]),
        (ONE, ["Message broker-a:0:3", "raymq query orders --offset broker-a:0:3", "&#34;order&#34;: 6"]),
        (f"{ONE}&as=hex", ["00000000  7b 22 6f"]),
        (f"{ONE}&as=nonsense", ["&#34;order&#34;: 6"]),
        ("/messages/track?topic=orders&offset=broker-a:0:3", ["billing", "retry 2", "consumed"]),
        ("/messages/track?topic=orders&offset=broker-a:0:999", ["has no message at"]),
        ("/topics/orders/tail", ["/topics/orders/tail/events"]),
        (LETTERS, ["Why a message failed is not kept", "Replay chosen"]),
        ("/groups/reports/dead-letters", ["No dead letter"]),
        (f"{LETTERS}/replay", ["No replay was started"]),
        ("/delayed", ["Waiting", "Next due", "Recall"]),
        ("/producers?q=nobody", ["No producer matches"]),
        ("/producers?q=shop", ["10.0.0.1@4711"]),
        ("/audit", ["Nobody has changed anything"]),
    ],
)
def test_a_page_shows_the_requested_messages(admin: AsgiClient, path: str, texts: list[str]) -> None:
    answer = admin.get(path)
    assert answer.status == 200
    assert [text for text in texts if text not in answer.text] == []


@pytest.mark.parametrize(
    ("path", "call"),
    [
        ("/topics/orders/messages", "browse"),
        ("/topics/orders/messages", "topic"),
        (ONE, "pull"),
        ("/messages?topic=orders&key=k3", "query_by_key"),
        ("/messages/track?topic=orders&offset=broker-a:0:3", "message_track"),
        (LETTERS, "dead_letters"),
        ("/delayed", "delayed"),
        ("/producers", "producer_connections"),
        ("/audit", "audit"),
    ],
)
def test_a_call_without_an_answer_leaves_the_page(
    admin: AsgiClient, cluster: FakeCluster, path: str, call: str
) -> None:
    cluster.errors[call] = RequestTimeoutError("broker-a", 10.0)
    answer = admin.get(path)
    assert answer.status == 200
    assert ("broker-a" in answer.text) or call == "topic"


def test_a_topic_that_is_not_there_has_no_page(admin: AsgiClient) -> None:
    assert admin.get("/topics/nothing/messages").status == 404


def test_a_group_without_dead_letters_has_an_empty_page_and_an_unknown_group_has_none(
    admin: AsgiClient, cluster: FakeCluster
) -> None:
    cluster.letters = {}
    assert "No dead letter" in admin.get(LETTERS).text
    assert admin.get("/groups/nobody/dead-letters").status == 404


@pytest.fixture
def shy(cluster: FakeCluster) -> Any:
    """Return a viewer's client of a console that hides message bodies. Every body in the cluster is SECRET."""
    secret = fake_message("orders", SECRET, queue_offset=3)
    cluster.messages["orders"] = [secret]
    cluster.letters["billing"] = [DeadLetter(secret, "orders", False)]
    client = logged_in(console_app(cluster, show_bodies=False), VIEWER_TOKEN)
    yield client
    client.close()


@pytest.mark.parametrize(
    "path",
    [
        *("/topics/orders/messages", "/topics/orders/messages/export?format=json", "/api/v1/topics/orders/messages"),
        *(ONE, f"{ONE}&as=hex", "/messages?topic=orders&key=k1", "/api/v1/messages?topic=orders&key=k1", "/delayed"),
        *(LETTERS, f"{LETTERS}/export", "/api/v1/groups/billing/dead-letters", "/api/v1/delayed"),
    ],
)
def test_a_hidden_body_is_on_no_page_and_in_no_file(shy: AsgiClient, path: str) -> None:
    answer = shy.get(path)
    assert answer.status == 200
    assert SECRET.decode() not in answer.text
    assert SECRET.hex(" ") not in answer.text


def test_hidden_bodies_are_not_downloaded_and_not_guessed_by_searches(shy: AsgiClient, cluster: FakeCluster) -> None:
    assert shy.get("/messages/body?topic=orders&offset=broker-a:0:3").status != 200
    assert "hidden from viewers" in shy.get("/topics/orders/messages?text=secret").text
    assert "hidden from viewers" in shy.get("/topics/orders/tail?text=secret").text
    assert shy.get("/topics/orders/tail/events?text=secret").status != 200
    assert "browse" not in cluster.asked


def test_an_admin_sees_bodies_that_are_hidden_from_viewers(cluster: FakeCluster) -> None:
    client = logged_in(console_app(cluster, show_bodies=False))
    assert "&#34;order&#34;: 6" in client.get(ONE).text
    client.close()


def test_a_download_is_the_whole_body_and_never_a_page(admin: AsgiClient, cluster: FakeCluster) -> None:
    body = b"<script>alert(1)</script>" + bytes(4 * 1024 * 1024 - 25)
    cluster.messages["orders"] = [fake_message("orders", body, queue_offset=3, message_id='a"/../<b>')]
    answer = admin.get("/messages/body?topic=orders&offset=broker-a:0:3")
    assert answer.body == body
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == 'attachment; filename="orders-a-..-b-.bin"'
    page = admin.get(ONE).text
    assert "Cut" in page
    assert len(page) < 10 * BODY_SHOWN_MAX_BYTES


def test_files_have_the_rows_that_the_page_shows(admin: AsgiClient) -> None:
    csv = admin.get("/topics/orders/messages/export?format=csv&limit=100")
    assert csv.headers["content-disposition"] == 'attachment; filename="messages-orders.csv"'
    assert csv.text.count("\r\n") == 61
    lines = admin.get("/topics/orders/messages/export?format=json").text.splitlines()
    assert json.loads(lines[0])["queue_offset"] == 29
    assert len(admin.get(f"{LETTERS}/export?format=json").text.splitlines()) == 2
    assert admin.get("/producers/export?format=xml").status == 400
    assert admin.get("/audit/export").status == 200


def test_the_json_has_cursor_and_bounds(admin: AsgiClient) -> None:
    found = admin.get("/api/v1/topics/orders/messages").json()
    assert (len(found["messages"]), found["scanned"], found["truncated"], found["cursor"]) == (50, 50, True, "50")
    more = admin.get(f"/api/v1/topics/orders/messages?cursor={found['cursor']}").json()
    assert (len(more["messages"]), more["cursor"]) == (10, None)


def test_a_message_is_sent_and_the_audit_has_no_body(admin: AsgiClient, cluster: FakeCluster) -> None:
    fields = {"body": "new-body", "tags": "t", "keys": "a b", "properties": "x=1", "delay": "5s"}
    before_ms = time.time_ns() // 1_000_000
    assert admin.post("/topics/orders/messages", fields).status == 303
    [(_, arguments)] = cluster.calls
    sent, now_ms = arguments["message"], time.time_ns() // 1_000_000
    assert sent == Message("orders", b"new-body", "t", ("a", "b"), {"x": "1"}, deliver_at_ms=sent.deliver_at_ms)
    assert before_ms + 5_000 <= sent.deliver_at_ms <= now_ms + 5_000
    assert "new-body" not in str(cluster.audit_entries)
    assert "Sent: message" in admin.get("/topics/orders/messages").text


def test_nothing_is_sent_for_a_form_without_sense(admin: AsgiClient, cluster: FakeCluster) -> None:
    admin.post("/topics/orders/messages", {"body": ""})
    assert "body is empty" in admin.get("/topics/orders/messages").text
    admin.post(ONE.replace("?", "/send?"), {"topic": "orders", "delay": "soon"})
    assert "not a delay" in admin.get(ONE).text
    admin.post(ONE.replace("?", "/deliver?"), {"group": ""})
    assert "group is missing" in admin.get(ONE).text.lower()
    assert cluster.calls == []


def test_a_message_is_sent_again_and_delivered_to_one_group(admin: AsgiClient, cluster: FakeCluster) -> None:
    admin.post(ONE.replace("?", "/send?"), {"topic": "payments", "body": "shown, not edited"})
    admin.post(ONE.replace("?", "/deliver?"), {"group": "billing"})
    [(_, sent), (_, delivered)] = cluster.calls
    assert sent["message"] == Message("payments", b'{"order": 6}', "paid", ("k6",))
    assert (delivered["topic"], delivered["to_group"]) == ("orders", "billing")


def test_a_replay_needs_a_choice(admin: AsgiClient, cluster: FakeCluster) -> None:
    admin.post(f"{LETTERS}/replay", {"which": "chosen"})
    assert "no dead letter is selected" in admin.get(LETTERS).text.lower()
    admin.post(f"{LETTERS}/replay", {"which": "all", "rate": "1e9"})
    assert "rate must be" in admin.get(LETTERS).text
    admin.post(f"{LETTERS}/replay", {"which": "chosen", "letter": "nonsense"})
    assert "is not an offset of a queue" in admin.get(LETTERS).text
    assert cluster.calls == []


def test_a_chosen_letter_is_all_that_is_replayed(admin: AsgiClient, cluster: FakeCluster) -> None:
    answer = admin.post(f"{LETTERS}/replay", {"which": "chosen", "letter": "broker-a:0:1", "rate": "5"})
    assert (answer.status, answer.headers["location"]) == (303, f"{LETTERS}/replay")
    eventually(lambda: "The last replay has ended" in admin.get(LETTERS).text, "the end of the replay")
    expected = {"group": "billing", "letters": [LetterPlace("broker-a", 0, 1)], "rate": 5.0}
    assert cluster.calls == [("replay_dead_letters", expected)]
    assert [letter.replayed for letter in cluster.letters["billing"]] == [False, True]
    eventually(lambda: admin.get("/healthz").status == 200 and cluster.audit_entries, "the entry in the audit")
    [entry] = cluster.audit_entries
    assert (entry.action, entry.arguments["letters"], entry.outcome) == (
        *("dead letters replay", "1"),
        "1 brought back, 0 failed",
    )


def test_a_delayed_message_is_recalled_by_its_handle(admin: AsgiClient, cluster: FakeCluster) -> None:
    one = cluster.delayed_messages[0]
    handle = str(RecallHandle(one.topic, one.message.broker_name, one.due_ms, one.message.message_id))
    assert handle in admin.get("/delayed").text
    admin.post("/delayed/recall", {"handle": handle})
    assert cluster.calls == [("recall", {"topic": "orders", "handle": handle})]
    admin.post("/delayed/recall", {"handle": "nonsense"})
    assert "not a recall handle" in admin.get("/delayed").text


@pytest.mark.parametrize("path", ["/topics/orders/messages", ONE, LETTERS, "/delayed"])
def test_a_viewer_has_no_form_for_changes(admin: AsgiClient, viewer: AsgiClient, path: str) -> None:
    assert viewer.get(path).text.count('method="post"') == 1  # the page's only form is the form for logging out
    assert admin.get(path).text.count('method="post"') > 1
