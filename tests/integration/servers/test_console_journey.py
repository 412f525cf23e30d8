"""Tests of the console on a live cluster: a browser uses its pages one after another, from the login until a store is
killed."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import ray
from playwright.sync_api import Page, expect

import raymq
from placement.actor_lifecycle import GOES_ON
from placement.console.live_control import live_cluster
from raymq.client.cluster.launcher import launch
from raymq.common.config.cluster import load_settings
from raymq.common.errors import ConfigError, RaymqError, ServiceNotAvailableError
from raymq.common.names import CONSOLE, StorageName
from raymq.remoting.actor_ref import ActorRef
from raymq.tools.console.app import create_app
from raymq.tools.console.settings import ConsoleSettings
from tests.support.browser.asgi_server import served
from tests.support.browser.chromium import launched, watched_page
from tests.support.clusters.cluster import one_group
from tests.support.history.waiting import eventually

SETTINGS = one_group("{replicas: 1}")
PATIENCE_MS = 60_000
"""Timeout, in ms, of each wait for the servers, for example until a message is retried or a store has
restarted."""
CALL_TIMEOUT_S = 30.0
ADMIN_TOKEN = "the admins' token"
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET


@pytest.fixture
def page(mq: raymq.Client) -> Iterator[Page]:
    """Yield a browser page of the console, before a login. Requests of the page may fail while a store does not answer;
    the page sends them again."""
    app = create_app(live_cluster(mq, "raymq"), ConsoleSettings(is_admin=lambda token: token == ADMIN_TOKEN))
    with (
        launched() as browser,
        served(app) as origin,
        watched_page(browser, origin, expected=("403", "503", "504")) as page,
    ):
        page.set_default_timeout(PATIENCE_MS)
        yield page


def refuses(message: raymq.MessageExt) -> None:
    """A message listener that always fails."""
    raise ValueError("out of stock")


@pytest.mark.long
def test_a_journey(mq: raymq.Client, page: Page, topic: str, group: str) -> None:
    expect.set_options(timeout=PATIENCE_MS)
    # The web page creates its own topic: it needs a new name, because the fixture `topic` has already created a topic.
    topic = f"{topic}-of-the-page"
    log_in(page)
    create_topic(page, topic)
    send(page, topic, "o-1", "the first order")
    find(page, topic, "o-1", "the first order")
    tail(page, topic)
    reset_with_a_preview(mq, page, topic, group)
    settings = {"consume_from": FIRST, "max_reconsume_times": 0}
    with mq.push_consumer(group, **settings).subscribe(topic).on_message(refuses).start():
        see_a_failure_and_the_dead_letter(page, group)
    replay(page, group)
    kill_the_store(page)


def reload_until(page: Page, shown: Callable[[], bool], what: str) -> None:
    """Reload a page, as a user would, until `shown` returns True. `what`: a description for the error message."""
    deadline_s = time.monotonic() + PATIENCE_MS / 1000
    while not shown():
        assert time.monotonic() < deadline_s, f"{what} is not shown: {page.inner_text('main')}"
        page.wait_for_timeout(300)
        page.reload()


def log_in(page: Page) -> None:
    page.goto("/topics")
    page.get_by_label("Token").fill("a wrong one")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_label("Token").fill(ADMIN_TOKEN)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="Topics")).to_be_visible()


def create_topic(page: Page, topic: str) -> None:
    page.get_by_text("New topic").click()
    page.get_by_label("Name", exact=True).fill(topic)
    page.get_by_label("Queues").fill("2")
    page.get_by_role("button", name="Create topic").click()
    expect(page.get_by_role("heading", name=topic)).to_be_visible()


def send(page: Page, topic: str, key: str, body: str) -> None:
    page.goto(f"/topics/{topic}/messages")
    page.get_by_text("Send a message").click()
    page.get_by_label("Body", exact=True).fill(body)
    page.get_by_label("Keys").fill(key)
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.get_by_text("Sent: message")).to_be_visible()


def find(page: Page, topic: str, key: str, body: str) -> None:
    page.goto("/messages")
    page.get_by_label("Topic").fill(topic)
    page.get_by_label("Key").fill(key)
    page.get_by_role("button", name="Find").click()
    # If a query finds a single message, the console's page shows the body of this message at once.
    shown = page.locator("pre").filter(has_text=body)
    reload_until(page, lambda: shown.count() > 0, "the message, found by its key")


def tail(page: Page, topic: str) -> None:
    page.goto(f"/topics/{topic}/tail")
    page.get_by_text("Live, 0 shown").wait_for()
    with page.context.expect_page() as opened:
        page.evaluate("window.open(location.pathname.replace('/tail', '/messages'))")
    other = opened.value
    send(other, topic, "o-2", "the second order")
    other.close()
    expect(page.get_by_role("cell", name="the second order")).to_be_visible()


def reset_with_a_preview(mq: raymq.Client, page: Page, topic: str, group: str) -> None:
    with mq.pull_consumer(group, consume_from=FIRST, auto_commit=False) as consumer:
        consumer.subscribe(topic)
        polled: list[raymq.MessageExt] = []
        while len(polled) < 2:
            polled += consumer.poll(timeout_s=30)
        consumer.commit()
    page.goto(f"/groups/{group}")
    page.get_by_text("Reset offsets", exact=True).click()
    page.get_by_label("Topic").first.fill(topic)
    page.get_by_label("Go on from").select_option(label="the earliest message")
    page.get_by_role("button", name="Preview reset").click()
    expect(page.get_by_text("Nothing is changed yet")).to_be_visible()
    assert sum(queue.committed or 0 for queue in mq.admin.describe_group(group)) == 2
    page.get_by_role("button", name="Reset offsets now").click()
    expect(page.get_by_role("heading", name=group)).to_be_visible()
    eventually(lambda: sum(queue.committed or 0 for queue in mq.admin.describe_group(group)) == 0, "the reset")


def see_a_failure_and_the_dead_letter(page: Page, group: str) -> None:
    page.goto(f"/groups/{group}")
    expect(page.get_by_text("ValueError: out of stock")).to_be_visible()
    page.goto(f"/groups/{group}/dead-letters")
    reload_until(page, lambda: page.get_by_role("checkbox").count() == 2, "two dead letters")


def replay(page: Page, group: str) -> None:
    page.goto(f"/groups/{group}/dead-letters")
    page.get_by_role("checkbox").first.check()
    page.get_by_role("button", name="Replay chosen").click()
    expect(page.get_by_text("brought back").first).to_be_visible()
    page.goto(f"/groups/{group}/dead-letters")
    # Reload the page until it lists only the dead letter that was not replayed. To hide a replayed dead letter, the
    # page looks up the replayed copy in the message index, which is updated a moment after the log.
    reload_until(page, lambda: page.get_by_role("checkbox").count() == 1, "the other dead letter alone")


def kill_the_store(page: Page) -> None:
    """Stop and kill a store while the console's page is open. The page shows an alert that the store does not answer,
    and recovers without a reload."""
    page.goto("/cluster")
    broker = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name="broker-a", exact=True))
    expect(broker).to_contain_text("ready")
    page.evaluate("window.notReloaded = true")
    store = ActorRef(str(StorageName("broker-a", 0)))
    pid = store.call("describe", timeout_s=30).pid
    # stop the store's process until the console's page shows the alert; the test then kills the process
    os.kill(pid, signal.SIGSTOP)
    try:
        expect(page.get_by_role("alert").first).to_be_visible()
    finally:
        os.kill(pid, signal.SIGKILL)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(broker).to_contain_text("ready")
    assert page.evaluate("window.notReloaded")


@pytest.mark.long
def test_the_console_is_at_the_same_address_after_its_process_was_killed(mq: raymq.Client, tmp_path: Path) -> None:
    config = tmp_path / "raymq.yaml"
    config.write_text("console: {port: 0}\n")
    address = ray.get_runtime_context().gcs_address
    first = launch("console", address, load_settings(config))
    try:
        assert answers(first["url"])
        os.kill(first["pid"], signal.SIGKILL)
        eventually(lambda: described().get("pid") not in (None, first["pid"]), "another process of the console")
        assert described()["url"] == first["url"]
        assert answers(first["url"])
        # The web console already runs, so `launch` returns the running process and starts no second process.
        assert launch("console", address, load_settings(config))["pid"] == described()["pid"]
    finally:
        launch("stop_console", address)


@pytest.mark.long
def test_a_start_with_wrong_settings_keeps_the_console_that_serves(mq: raymq.Client, tmp_path: Path) -> None:
    config, address = tmp_path / "raymq.yaml", ray.get_runtime_context().gcs_address

    def start(options: str) -> dict[str, Any]:
        config.write_text(f"console: {{{options}}}\n")
        found: dict[str, Any] = launch("console", address, load_settings(config))
        return found

    first = start("port: 0")
    try:
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = other.getsockname()[1]
            with pytest.raises(ServiceNotAvailableError, match=f"port {taken}, of this node.*{GOES_ON}"):
                start(f"port: {taken}")
        with pytest.raises(ConfigError, match=rf"console\.tls_cert.*{GOES_ON}"):
            start("port: 0, tls_cert: /nowhere/chain.pem, tls_key: /nowhere/key.pem")
        assert described()["pid"] == first["pid"]
        assert answers(first["url"])
    finally:
        launch("stop_console", address)


def described() -> dict[str, Any]:
    try:
        found: dict[str, Any] = ActorRef(CONSOLE).call("describe", timeout_s=CALL_TIMEOUT_S)
    except RaymqError:
        return {}
    return found


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=CALL_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except URLError:
        return False
