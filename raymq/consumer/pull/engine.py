"""The shell around one SubscriptionState, for pull consumers of both kinds: PullConsumer waits for it,
AsyncPullConsumer awaits it.

    PullGroupMember        its group and its brokers: queues come and go, offsets are committed
    Fetcher threads  records → SubscriptionState → `on_news` → peek → take

All decisions and all state are SubscriptionState's, under one lock that is never held over a call. Offsets are
committed to the brokers; the rest is gone with the process, so messages that were returned but not committed are
delivered again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from raymq.consumer.fetcher import Fetcher
from raymq.consumer.group_offsets import GroupOffsets
from raymq.consumer.pull.fetched_records import Decode, FetchedRecords, Found, PolledRecords
from raymq.consumer.pull.group_member import PullGroupMember
from raymq.consumer.pull.settings import PullSettings
from raymq.consumer.pull.subscription_state import SubscriptionState
from raymq.consumer.queue_change import QueueWatch
from raymq.consumer.queue_lookup import QueueLookup
from raymq.consumer.rebalance_client import RebalanceClient
from raymq.consumer.subscription import Subscription
from raymq.errors import (
    ClientStateError,
    DataLossError,
    InvalidArgumentError,
    OffsetOutOfRangeError,
    StoreCorruptError,
)
from raymq.message import MessageQueue, PullStatus
from raymq.protocol.clients import ConsumerData
from raymq.protocol.store import FetchRequest, FetchResult
from raymq.remoting.route_cache import ROUTE_TIMEOUT_S, RouteCache
from raymq.remoting.storage_clients import StorageClients

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PullEngine:
    """One consumer. Thread-safe. `on_news` is called, from any thread, when a poll that waits should look again.

    `room`: the Ray node this process runs on. `announce` is told what is consumed, when that changes. After `close`,
    every method but `close` raises ClientStateError.
    """

    def __init__(
        self,
        settings: PullSettings,
        *,
        routes: RouteCache,
        storages: StorageClients,
        room: str,
        announce: Callable[[PullEngine, ConsumerData], None],
        on_close: Callable[[PullEngine], None],
    ) -> None:
        self.settings = settings
        self.on_news: Callable[[], None] = lambda: None
        self._announce = announce
        self._on_close = on_close
        self._routes = routes
        self._lookup = QueueLookup(routes, storages)
        self._watch = QueueWatch(self._lookup.queues, settings.queue_check_interval_s, f"queues-{settings.group}")
        self._lock = threading.Lock()
        self._core = SubscriptionState(settings, time.monotonic())
        self._change_lock = threading.Lock()
        self._mode = ""
        self._losses: dict[MessageQueue, tuple[int, DataLossError]] = {}
        """By queue the offset that could not be read last, and why."""
        self._untold: set[MessageQueue] = set()
        self._closing = threading.Event()
        self._fetcher = Fetcher(
            wanted=self._wanted,
            held=self._held,
            deliver=self._deliver,
            request=self._request,
            storages=lambda queue: routes.get(queue.topic).pull_storages(queue.broker_name),
            storage=storages.get,
            outdated=lambda queue: routes.forget(queue.topic),
            lost=self._lose,
        )
        self._group = PullGroupMember(
            self._core,
            self._lock,
            settings,
            offsets=GroupOffsets(settings.group),
            rebalance=RebalanceClient(settings.group, routes),
            room=room,
            on_queues=self._fetcher.wake,
        )

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    @property
    def lookup(self) -> QueueLookup:
        """For questions about any queue."""
        self.check_open()
        return self._lookup

    @property
    def watch(self) -> QueueWatch:
        """For queue-change listeners."""
        self.check_open()
        return self._watch

    # What is consumed

    def subscribe(self, topic: str, expression: str | None) -> None:
        """Share the topic's queues with the group. Blocks for calls; errors as PullConsumer.subscribe says."""
        subscription = Subscription.parse(topic, expression)
        with self._change_lock:
            self._check_mode("subscribe")
            self._group.make_known(self._routes.wait(topic, ROUTE_TIMEOUT_S).brokers)
            self._mode = "subscribe"
            with self._lock:
                self._core.subscribe(subscription)
            self._group.start(member=True)
            self._say_what_is_consumed()

    def unsubscribe(self, topic: str) -> None:
        """Return nothing more of the topic, and give its queues back once the program polls again."""
        self.check_open()
        with self._lock:
            if self._mode != "subscribe" or topic not in self._core.subscriptions:
                raise ClientStateError(f"this consumer does not subscribe to topic {topic!r}")
            self._core.unsubscribe(topic)
        self._say_what_is_consumed()

    def assign(self, queues: Iterable[MessageQueue], expression: str | Mapping[str, str] | None) -> None:
        """Hold exactly these queues. Blocks for calls; errors as PullConsumer.assign says."""
        wanted = sorted({self.lookup.check(queue) for queue in queues})
        texts = expression if isinstance(expression, Mapping) else dict.fromkeys({q.topic for q in wanted}, expression)
        subscriptions = {queue.topic: Subscription.parse(queue.topic, texts.get(queue.topic)) for queue in wanted}
        with self._change_lock:
            self._check_mode("assign")
            self._group.make_known({queue.broker_name for queue in wanted})
            starts = self._group.starts(wanted)
            if self.settings.auto_commit:
                self._group.commit_all(finished=True)
            self._mode = "assign"
            with self._lock:
                self._core.assign(subscriptions, starts)
            self._group.start(member=False)
            self._say_what_is_consumed()
        self._fetcher.wake()

    def assignment(self) -> list[MessageQueue]:
        return self._ask(lambda core: core.held)

    def _say_what_is_consumed(self) -> None:
        with self._lock:
            subscriptions = {topic: entry.expression for topic, entry in self._core.subscriptions.items()}
        where = self.settings.start.where
        self._announce(self, ConsumerData(self.settings.group, "PULL", subscriptions, consume_from=where))

    def _check_mode(self, mode: str) -> None:
        self.check_open()
        if self._mode not in ("", mode):
            raise ClientStateError(
                f"this consumer uses {self._mode}, which excludes {mode}; make another consumer for that"
            )

    # Polling

    def poll_begins(self, max_messages: int, timeout_s: float) -> None:
        """What earlier polls returned is finished, with auto-commit. Raises what makes polling useless."""
        self.check_open()
        if max_messages < 1 or timeout_s < 0:
            raise InvalidArgumentError(
                f"poll needs max_messages ≥ 1 and timeout_s ≥ 0, not {max_messages}, {timeout_s}"
            )
        self._group.raise_refusal()
        self.raise_loss()
        now_s = time.monotonic()
        with self._lock:
            self._core.poll_begins(now_s)
            useless = not self._core.subscriptions and self._mode != "assign"
            if useless:
                self._core.poll_ends(now_s)
            work = self._core.commits_due(now_s) or self._core.leaving
        if work:
            self._group.work()
        if useless:
            raise ClientStateError(
                "this consumer has no subscription; call subscribe(topic) before poll(), or assign(queues)"
            )

    def poll_ends(self) -> None:
        """The poll that began is over."""
        with self._lock:
            self._core.poll_ends(time.monotonic())

    def raise_failure(self) -> None:
        """Raise why nothing comes, for a poll that found nothing: the group could never be joined, or a queue's next
        message is lost."""
        self._group.raise_failure()
        with self._lock:
            self._untold.update(self._losses)
        self.raise_loss()

    def raise_loss(self) -> None:
        """Raise that a queue's next message is lost, once for each time that it could not be read. The other queues go
        on."""
        with self._lock:
            for queue in sorted(self._untold):
                offset, error = self._losses[queue]
                if not self._core.reads(queue, offset):
                    del self._losses[queue]
                elif self._core.get(queue).position < offset:
                    continue  # what comes before it still waits here
                self._untold.discard(queue)
                if queue in self._losses:
                    raise error

    def peek(self, max_messages: int) -> list[PolledRecords]:
        """The next records; they stay until they are taken."""
        self._group.fence()  # the process may have stood still since the call before
        with self._lock:
            return self._core.peek(max_messages)

    def decode(self, decode: Decode[Found], slices: list[PolledRecords]) -> list[tuple[PolledRecords, Found]]:
        """`decode(slices)`; what turns out damaged is read anew. Takes time, but waits for nothing."""
        try:
            return decode(slices)
        except StoreCorruptError:
            with self._lock:
                for part in slices:
                    self._core.refetch(part.queue)
            self._fetcher.wake()
            raise

    def take(self, decoded: Iterable[tuple[PolledRecords, Found]]) -> list[tuple[PolledRecords, Found]]:
        """Those slices that are still current, which count as returned now."""
        self._group.fence()
        taken = []
        with self._lock:
            before = len(self._core.wanted())
            for part, found in decoded:
                if self._core.is_current(part):
                    self._core.taken(part)
                    taken.append((part, found))
            more = len(self._core.wanted()) > before
        if more:
            self._fetcher.wake()
        return taken

    # Places

    def position(self, queue: MessageQueue) -> int:
        return self._ask(lambda core: core.get(queue).position)

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        self._ask(lambda core: core.pause(queues))

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        self._ask(lambda core: core.resume(queues))
        self._fetcher.wake()

    def paused(self) -> list[MessageQueue]:
        return self._ask(lambda core: core.paused)

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Blocks for a call. OffsetOutOfRangeError outside what the queue holds."""
        self.position(queue)  # it must be held; before any call
        bounds = self._lookup.bounds(queue)
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise InvalidArgumentError(f"offset {offset!r} is not a number of messages")
        if not bounds.min_offset <= offset <= bounds.max_offset:
            raise OffsetOutOfRangeError(str(queue), offset, bounds.min_offset, bounds.max_offset)
        self._seek(queue, offset)

    def seek_to_begin(self, queue: MessageQueue) -> None:
        self.position(queue)
        self._seek(queue, self._lookup.bounds(queue).min_offset)

    def seek_to_end(self, queue: MessageQueue) -> None:
        self.position(queue)
        self._seek(queue, self._lookup.bounds(queue).max_offset)

    def lag(self) -> dict[MessageQueue, int]:
        """Blocks for a call per held queue."""
        ends = self.lookup.end_offsets(self.assignment())
        with self._lock:
            held = set(self._core.held)
            return {queue: max(0, end - self._core.get(queue).position) for queue, end in ends.items() if queue in held}

    def _seek(self, queue: MessageQueue, offset: int) -> None:
        self._ask(lambda core: core.seek(queue, offset))
        self._fetcher.wake()

    # Committing

    def commit(self, offsets: Mapping[MessageQueue, int] | None) -> dict[MessageQueue, int]:
        """Commit everything polls returned, or these offsets. Blocks for calls; durable on return."""
        self.check_open()
        if offsets is None:
            return self._group.commit_all(finished=True)
        self._ask(lambda core: core.finish(offsets))
        return self._group.commit()

    def committed(self, queue: MessageQueue) -> int | None:
        """Blocks for a call."""
        return self._group.committed(self.lookup.check(queue))

    # What the fetcher asks and brings

    def _wanted(self) -> Mapping[MessageQueue, int]:
        with self._lock:
            return self._core.wanted()

    def _held(self) -> frozenset[MessageQueue]:
        with self._lock:
            return frozenset(self._core.held)

    def _request(self, queue: MessageQueue, offset: int) -> FetchRequest:
        with self._lock:
            return self._core.request(queue, offset)

    def _deliver(self, queue: MessageQueue, offset: int, result: FetchResult) -> None:
        if result.status is PullStatus.OFFSET_ILLEGAL:
            with self._lock:
                jumps = self._core.out_of_range(queue, offset, result.next_offset)
            if jumps:
                logger.warning("%s: offset %d is gone, going on at %d", queue, offset, result.next_offset)
            return
        run = FetchedRecords.read(result.records, result.next_offset)
        with self._lock:
            self._losses.pop(queue, None)
            self._untold.discard(queue)
            news = self._core.fetched(queue, offset, run) and run.count > 0
        if news:
            self.on_news()

    def _lose(self, queue: MessageQueue, offset: int, error: DataLossError) -> None:
        told = DataLossError(
            f"{queue}: the message at offset {offset} cannot be read: {error}; bring the file back, or seek behind "
            "what is lost (raymq topic describe tells what the queue holds)"
        )
        with self._lock:
            if not self._core.reads(queue, offset):
                return  # it has been moved meanwhile
            self._losses[queue] = (offset, told)
            self._untold.add(queue)
        self.on_news()

    # Life

    def close(self, *, finished: bool = True) -> None:
        """With auto-commit, commit; then leave the group and end the threads. `finished`: the program has finished with
        what the last poll returned. Idempotent; what the commit raises is raised once everything has ended."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
        self.on_news()
        try:
            if self.settings.auto_commit:
                self._group.commit_all(finished=finished)
        finally:
            self._fetcher.stop()
            self._watch.stop()
            self._group.stop()
            self._on_close(self)

    def check_open(self) -> None:
        """ClientStateError after `close`."""
        if self._closing.is_set():
            raise ClientStateError("this consumer is closed; make a new one with client.pull_consumer(...)")

    def _ask(self, question: Callable[[SubscriptionState], T]) -> T:
        self.check_open()
        with self._lock:
            return question(self._core)
