"""Tests of the stores' hooks in a whole cluster: the example of docs/hooks.md, refused messages in a batch, and
consumers on the store's node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import raymq
from tests.support.clusters.cluster import SETTINGS as DEFAULTS, embedded, poll_until, sandbox
from tests.support.clusters.page_example import DOCS, run_program
from tests.support.history.waiting import eventually

PAGE = (DOCS / "hooks.md").read_text()
FIRST = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET

pytestmark = pytest.mark.long

MORE = """
import os


class Notes:
    '''Appends a line for each batch that is handed out to a file.'''

    def __init__(self):
        self._path = os.environ["HOOK_NOTES"]

    def __call__(self, batch):
        with open(self._path, "a") as notes:
            for body in batch.columns(["body"]).column("body").to_pylist():
                notes.write(f"{batch.topic} {bytes(body).decode()}\\n")
"""
HOOKS = """\
  put_hooks: ["shop_hooks:no_card_numbers"]
  consume_hooks: ["shop_hooks:Notes"]
  hook_timeout_ms: 60000
"""


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hooks") / "notes"


@pytest.fixture(scope="module")
def mq(notes: Path) -> Iterator[raymq.Client]:
    """Run a cluster whose stores have the hooks of docs/hooks.md, and a hook that records delivered messages. Yields a
    client."""
    [module, _] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    (notes.parent / "shop_hooks.py").write_text(module + MORE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(notes.parent))
        patch.setenv("HOOK_NOTES", str(notes))
        with sandbox(DEFAULTS.replace("store:\n", f"store:\n{HOOKS}")) as box, embedded(box) as client:
            yield client


def test_the_page_is_true(mq: raymq.Client) -> None:
    [_, program] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    [printed] = re.findall(r"^```text\n(.*?)^```$", PAGE, re.M | re.S)
    assert run_program(program) == printed


def test_only_the_refused_messages_of_a_batch_fail(mq: raymq.Client) -> None:
    with mq.producer() as producer:
        bodies = [b"card=%d" % n if n % 7 == 3 else b"fine %d" % n for n in range(40)]
        futures = [producer.send_async(raymq.Message("orders", body, keys=[str(n)])) for n, body in enumerate(bodies)]
        producer.flush()
        failed = {n for n, future in enumerate(futures) if isinstance(future.exception(), raymq.MessageRefusedError)}
        assert failed == {n for n in range(40) if n % 7 == 3}
        assert all(futures[n].result().status is raymq.SendStatus.SEND_OK for n in range(40) if n not in failed)


def test_consumers_on_the_stores_node_are_seen_too(mq: raymq.Client, notes: Path) -> None:
    mq.admin.create_topic("seen", queues=2)
    with mq.producer() as producer:
        for n in range(10):
            producer.send(raymq.Message("seen", b"%d" % n))
    with mq.pull_consumer("readers", consume_from=FIRST) as consumer:
        consumer.subscribe("seen")
        assert len(poll_until(consumer, 10)) == 10
    expected = {f"seen {n}" for n in range(10)}
    eventually(lambda: expected <= set(notes.read_text().splitlines()), "the hook has noted all")
