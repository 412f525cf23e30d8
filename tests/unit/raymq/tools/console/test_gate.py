"""Tests that no user reads or changes anything in the console without the right that the request needs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from starlette.routing import Mount, Route

from raymq.common.errors import SystemBusyError
from raymq.tools.console.app import console_routes
from raymq.tools.console.pages.login import LOGIN_FIELD_MAX_BYTES, LOGIN_FIELDS_MAX
from raymq.tools.console.security.gate import OWN_SESSION_PATHS, SECURITY_HEADERS, SESSION_COOKIE
from raymq.tools.console.security.sessions import SESSION_LIFE_S, Role, Sessions
from raymq.tools.console.security.tokens import WRONG_SECRETS_MAX, WRONG_SECRETS_S, GuardedCheck
from tests.support.cases import check_all
from tests.support.console.asgi_client import AsgiClient
from tests.support.console.fake_cluster import FakeCluster
from tests.support.console.logged_in import ADMIN_TOKEN, VIEWER_TOKEN, console_app, logged_in


def addresses(method: str) -> list[str]:
    """Return all URL paths of the console for an HTTP method, with parameters replaced by existing names."""
    routes = [route for route in console_routes() if isinstance(route, Route)]
    assert len(routes) > 20
    names = {"topic": "orders", "group": "billing"}
    return sorted(
        re.sub(r"{(\w+)(:\w+)?}", lambda match: names.get(match[1], "1"), route.path)
        for route in routes
        if method in (route.methods or ())
    )


CHANGES = [path for path in addresses("POST") if path not in OWN_SESSION_PATHS]
PAGES = [path for path in addresses("GET") if path not in ("/login", "/healthz", "/favicon.ico")]


def test_there_are_changes_and_pages():
    assert {"/topics", "/topics/orders/delete", "/groups/billing/reset", "/cluster/drain"} <= set(CHANGES)
    assert {"/", "/topics", "/groups", "/cluster", "/api/v1/topics", "/audit"} <= set(PAGES)


@pytest.mark.parametrize("path", CHANGES)
def test_a_viewer_changes_nothing(viewer: AsgiClient, cluster: FakeCluster, path: str):
    fields = {"confirm": "orders", "topic": "t", "node": "n", "broker": "b", "write": "on", "to": "latest"}
    answer = viewer.post(path, fields)
    assert (answer.status, cluster.calls, cluster.audit_entries) == (403, [], [])


@pytest.mark.parametrize("path", CHANGES)
def test_nobody_changes_anything_while_the_console_is_read_only(cluster: FakeCluster, path: str):
    client = logged_in(console_app(cluster, read_only=True))
    assert (client.post(path).status, cluster.calls) == (403, [])
    client.close()


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": "http://console.test.evil"},
        {"origin": "http://console.test", "sec-fetch-site": "cross-site"},
        {"origin": "http://console.test", "sec-fetch-site": "same-site"},
    ],
    ids=str,
)
def test_a_change_from_another_site_is_refused(admin: AsgiClient, cluster: FakeCluster, headers: dict[str, str]):
    def check(path: str) -> None:
        assert admin.post(path, {}, headers).status == 403

    check_all(CHANGES, check)
    assert cluster.calls == []


def test_a_session_change_without_an_origin_is_refused(admin: AsgiClient, cluster: FakeCluster):
    assert admin.request("POST", "/cluster/balance").status == 403
    assert cluster.calls == []


@pytest.mark.parametrize("path", PAGES)
def test_a_stranger_sees_no_page(stranger: AsgiClient, cluster: FakeCluster, path: str):
    answer = stranger.get(path)
    if path.startswith("/api/"):
        assert answer.status == 401
    else:
        assert answer.status == 303
        assert answer.headers["location"].startswith("/login")
    assert cluster.asked == []


def test_a_stranger_sees_the_login_and_its_files(stranger: AsgiClient):
    login = stranger.get("/login")
    assert login.status == 200
    files = re.findall(r'(?:href|src)="(/static/[^"]+)"', login.text)
    assert len(files) >= 4
    assert [stranger.get(path).status for path in files] == [200] * len(files)
    assert stranger.get("/healthz").text == "ok\n"


@pytest.mark.parametrize("path", ["/", "/topics", "/login", "/nothing", "/static/console.css", "/api/v1/topics"])
def test_every_answer_has_the_headers(admin: AsgiClient, stranger: AsgiClient, path: str):
    for client in (admin, stranger):
        headers = client.get(path).headers
        assert {name: headers.get(name.lower()) for name in SECURITY_HEADERS} == SECURITY_HEADERS


def test_an_error_of_the_console_itself_has_the_headers_and_no_secret(admin: AsgiClient, cluster: FakeCluster):
    cluster.errors["readings"] = ZeroDivisionError("secret of the server")
    answer = admin.get("/topics")
    assert (answer.status, "secret" in answer.text) == (500, False)
    assert "The console failed; its log has the details." in answer.text
    assert {name: answer.headers.get(name.lower()) for name in SECURITY_HEADERS} == SECURITY_HEADERS


def test_the_policy_admits_no_inline_script():
    policy = SECURITY_HEADERS["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy


def test_the_session_is_a_cookie_that_no_script_and_no_other_site_gets(stranger: AsgiClient):
    answer = stranger.post("/login", {"token": ADMIN_TOKEN})
    cookie = answer.headers["set-cookie"]
    assert {part.strip().lower() for part in cookie.split(";")[1:]} == {
        "httponly",
        f"max-age={int(SESSION_LIFE_S)}",
        "path=/",
        "samesite=strict",
    }
    assert "token" not in stranger.cookies[SESSION_COOKIE]
    assert len(stranger.cookies[SESSION_COOKIE]) >= 40


def test_under_tls_the_cookie_is_for_tls_only(cluster: FakeCluster):
    client = AsgiClient(console_app(cluster, secure=True))
    assert "secure" in client.post("/login", {"token": ADMIN_TOKEN}).headers["set-cookie"].lower()
    client.close()


def test_the_login_leads_to_the_page_that_was_asked_for_and_to_no_other_site(stranger: AsgiClient):
    asked = stranger.get("/topics/a%25b?x=1").headers["location"]
    assert asked == "/login?next=%2Ftopics%2Fa%25b%3Fx%3D1"
    for wanted, comes in (("/groups", "/groups"), ("//evil/", "/"), ("http://evil", "/"), ("/\\evil", "/")):
        answer = stranger.post("/login", {"token": ADMIN_TOKEN, "next": wanted})
        assert answer.headers["location"] == comes


@pytest.mark.parametrize(
    ("page", "login"),
    [
        ("http://console:8270/topics/a%25b?x=1", "/login?next=%2Ftopics%2Fa%25b%3Fx%3D1"),
        ("http://console:8270/", "/login"),
        ("http://[", "/login"),
    ],
)
def test_a_part_of_a_page_leads_to_the_login_and_back_to_the_whole_page(stranger: AsgiClient, page: str, login: str):
    answer = stranger.get("/parts/anything", {"hx-request": "true", "hx-current-url": page})
    assert (answer.status, answer.headers["hx-redirect"]) == (401, login)


def test_a_logged_out_user_has_no_access_even_with_the_old_cookie(admin: AsgiClient):
    old = dict(admin.cookies)
    assert admin.post("/logout").status == 303
    admin.cookies = old
    assert admin.get("/topics").status == 303


def test_a_page_that_is_open_when_the_session_ends_goes_to_the_login(stranger: AsgiClient):
    answer = stranger.get("/", {"hx-request": "true"})
    assert (answer.status, answer.headers["hx-redirect"]) == (401, "/login")


def test_a_script_sends_its_token_with_each_request(stranger: AsgiClient, cluster: FakeCluster):
    script = {"authorization": f"Bearer {ADMIN_TOKEN}", "accept": "application/json"}
    assert stranger.get("/api/v1/topics", script).status == 200
    assert stranger.request("POST", "/cluster/balance", script).json() == {"outcome": "done"}
    assert [entry.who for entry in cluster.audit_entries] == ["script"]
    assert stranger.request("POST", "/cluster/balance", {**script, "origin": "http://evil"}).status == 403
    look = {"authorization": f"Bearer {VIEWER_TOKEN}"}
    assert (stranger.get("/api/v1/topics", look).status, stranger.request("POST", "/topics", look).status) == (200, 403)
    assert stranger.get("/api/v1/topics", {"authorization": "Bearer wrong"}).status == 403


def test_wrong_tokens_do_not_lock_out_other_users_of_the_address(app: Any, stranger: AsgiClient):
    for _ in range(WRONG_SECRETS_MAX + 5):
        assert stranger.post("/login", {"token": "wrong"}).status == 403
        assert stranger.get("/api/v1/topics", {"authorization": "Bearer wrong"}).status == 403
    assert stranger.get("/api/v1/topics", {"authorization": f"Bearer {VIEWER_TOKEN}"}).status == 200
    assert stranger.get("/api/v1/topics", {"authorization": f"Bearer {ADMIN_TOKEN}"}).status == 200
    assert stranger.post("/login", {"token": ADMIN_TOKEN}).status == 303


def test_guesses_at_a_secret_are_bounded_and_the_tokens_and_a_known_secret_get_in(cluster: FakeCluster):
    guarded = GuardedCheck(lambda secret: Role.ADMIN if secret in ("known", "other") else "")
    client = AsgiClient(console_app(cluster, guarded=guarded))

    def status(token: str) -> int:
        return client.get("/api/v1/topics", {"authorization": f"Bearer {token}"}).status

    assert status("known") == 200
    assert [status(f"wrong-{number}") for number in range(WRONG_SECRETS_MAX)] == [403] * WRONG_SECRETS_MAX
    assert [status(token) for token in ("wrong", "other")] == [429, 429]
    assert "Too many wrong secrets" in client.post("/login", {"token": "wrong"}).text
    assert [status(token) for token in ("known", ADMIN_TOKEN, VIEWER_TOKEN)] == [200, 200, 200]
    client.close()


def test_a_stranger_cannot_fill_the_consoles_memory(stranger: AsgiClient):
    assert stranger.post("/login", {"token": "x" * (LOGIN_FIELD_MAX_BYTES + 1)}).status == 400
    assert stranger.post("/login", {f"field{n}": "" for n in range(LOGIN_FIELDS_MAX + 1)}).status == 400


def test_guesses_are_allowed_again_when_old_wrong_guesses_expire():
    now_s, asked = [100.0], []
    guarded = GuardedCheck(lambda secret: asked.append(secret) or "", lambda: now_s[0])
    for number in range(WRONG_SECRETS_MAX):
        assert guarded(f"wrong-{number}") == ""
        now_s[0] += 0.5
    with pytest.raises(SystemBusyError, match="wait 20 s"):
        guarded("next")
    now_s[0] = 100.0 + WRONG_SECRETS_S
    assert guarded("next") == ""
    with pytest.raises(SystemBusyError):
        guarded("one more")
    assert len(asked) == WRONG_SECRETS_MAX + 1


def test_a_session_ends_after_twelve_hours():
    sessions = Sessions()
    session = sessions.begin("Ada", Role.ADMIN, "a", 0.0)
    assert sessions.find(session.user.session, SESSION_LIFE_S - 1) is session
    assert sessions.find(session.user.session, SESSION_LIFE_S) is None
    assert sessions.find("", 0.0) is None


def test_a_console_without_tokens_answers_to_this_machine_only(cluster: FakeCluster):
    app = console_app(cluster, open_to_all=True)
    here, rebound = AsgiClient(app, host="localhost:8270"), AsgiClient(app, host="evil.test")
    for host in ("127.0.0.1", "[::1]:8270", "LOCALHOST"):
        assert here.get("/topics", {"host": host}).status == 200
    for host in ("[", "", "localhost.evil.test", "127.0.0.1.evil.test"):
        assert here.get("/topics", {"host": host}).status == 403
    assert (here.get("/topics").status, rebound.get("/topics").status) == (200, 403)
    assert here.post("/cluster/balance").status == 303
    assert "leads are being spread" in here.get("/cluster").text
    assert rebound.post("/cluster/balance").status == 403
    here.close(), rebound.close()


def test_all_addresses_are_below_the_base_path(cluster: FakeCluster):
    app = console_app(cluster, base_path="/mq")
    client = logged_in(app, base_path="/mq")
    text = client.get("/mq/topics").text
    links = re.findall(r'(?:href|src|action|hx-get)="([^"#]+)"', text)
    assert len(links) > 10
    assert [link for link in links if not link.startswith("/mq/")] == []
    assert client.post("/mq/cluster/balance").headers["location"] == "/mq/cluster"
    assert client.get("/topics").status == 404
    client.close()


def test_the_only_mounted_part_is_the_files():
    assert [route.path for route in console_routes() if isinstance(route, Mount)] == ["/static"]
