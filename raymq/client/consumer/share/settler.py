"""Settler tells one broker what became of leased messages: acknowledge them, store dead letters, make messages visible
again.

One call is under way at a time; what arrives during the call goes with the next call. So many acknowledgements share
one record at the broker. Each broker has its own thread, so a broker that does not answer delays no other broker's
messages. A call that failed is repeated until it succeeds, or until the lease of its messages has ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from raymq.client.consumer.share.leased_tasks import Later, Letter, Settlement
from raymq.client.consumer.simple.engine import SimpleEngine
from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.common.errors import RaymqError
from raymq.common.parallel import require_daemon
from raymq.common.retry import Backoff

SETTLE_RETRY_MAX_S: Final = 2.0
"""Maximum pause in s before a failed call is repeated."""

logger = logging.getLogger(__name__)


class Settler:
    """Carries out settlements of one broker's messages, in a thread. Thread-safe. `on_settled(count, size_bytes)` is
    called when messages are held no more."""

    def __init__(self, broker_name: str, engine: SimpleEngine, on_settled: Callable[[int, int], None]) -> None:
        self._broker_name, self._engine, self._on_settled = broker_name, engine, on_settled
        self._changed = threading.Condition()
        self._waiting: list[Settlement] = []
        self._busy = self._closed = False
        require_daemon(self._run, name=f"settle-{broker_name}", what="a share-mode consumer")

    def put(self, settlement: Settlement) -> None:
        """Carry out a settlement soon."""
        with self._changed:
            self._waiting.append(settlement)
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """True if no settlement waits or is under way."""
        with self._changed:
            return not self._waiting and not self._busy

    def close(self) -> None:
        """Begin no further call. Messages that are not settled are delivered again after their leases. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                gathered, self._waiting, self._busy = self._waiting, [], True
            try:
                self._settle(gathered)
            except Exception:  # a bug: without this thread the broker's messages would stay leased for ever
                logger.exception("cannot settle messages of broker %s", self._broker_name)
            for one in gathered:
                self._on_settled(one.count, one.size_bytes)

    def _settle(self, gathered: list[Settlement]) -> None:
        acks = [message for one in gathered for message in one.acks]
        if acks:
            self._repeat(acks, lambda: self._engine.ack(acks))
        for letter in [letter for one in gathered for letter in one.letters]:
            self._send_letter(letter)
        by_time: dict[tuple[int, bool], list[ReceivedMessage]] = {}
        for later in [later for one in gathered for later in one.later]:
            by_time.setdefault((later.invisible_ms, later.counted), []).extend(later.messages)
        for (invisible_ms, counted), messages in by_time.items():
            self._return(Later(tuple(messages), invisible_ms, counted))

    def _send_letter(self, letter: Letter) -> None:
        message, attempts, failure = letter
        self._repeat([message], lambda: self._engine.dead_letter(message, attempts, failure))

    def _return(self, later: Later) -> None:
        messages, invisible_s = later.messages, later.invisible_ms / 1000
        self._repeat(
            list(messages), lambda: self._engine.change_invisible(messages, invisible_s, counted=later.counted)
        )

    def _repeat(self, messages: list[ReceivedMessage], call: Callable[[], object]) -> None:
        """Make a call about messages, and repeat it while it fails for a reason that may pass and a lease is in
        force."""
        backoff = Backoff(max_s=SETTLE_RETRY_MAX_S)
        while True:
            try:
                call()
                return
            except RaymqError as error:
                leased = any(self._engine.valid_until_s(message._receipt) for message in messages)
                again = error.retryable and leased and not self._closed
                logger.warning(
                    "%d messages of broker %s cannot be settled now%s: %s",
                    *(len(messages), self._broker_name, "" if again else "; they are delivered again", error),
                )
                if not again:
                    self._engine.release(messages)
                    return
                pause_s = max(backoff.next(), error.retry_after_s or 0.0)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause_s)
