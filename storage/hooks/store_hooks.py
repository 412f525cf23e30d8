"""Passes batches through the hooks of a store: HookedWrite before they are stored, HookedFetches when they are fetched.

Hooks do not see messages that the server writes into its own topics. A put hook that fails changes nothing, as in
RocketMQ; with put_hooks_must_succeed the messages are refused instead. A consume hook never changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from typing import NamedTuple, Protocol

from raymq.common.config.store import StoreSettings
from raymq.common.delay import names_real_topic
from raymq.common.errors import MessageIllegalError, MessageRefusedError, SystemBusyError
from raymq.common.message import PROPERTY_REAL_QUEUE_ID, PROPERTY_REAL_TOPIC, PullStatus
from raymq.common.names import is_system_topic
from raymq.common.protocol.store import FetchRequest, FetchResult, HookFigures
from raymq.records.format.decode import decode_record
from raymq.records.format.encode import EncodedBatch
from raymq.records.format.layout import RecordError
from raymq.records.hooks import FetchedBatch, PutBatch
from raymq.records.kernels.check import validate_batch
from storage.append.durability import WriteBatches, Written
from storage.hooks.hook import Hook


class StoreHooks(NamedTuple):
    """The hooks of one store, in the order of the settings. Hooks are called in this order."""

    put: tuple[Hook, ...] = ()
    consume: tuple[Hook, ...] = ()

    def figures(self) -> tuple[HookFigures, ...]:
        """Return the counters of each hook since the store was opened."""
        return tuple(hook.figures() for hook in (*self.put, *self.consume))


def open_hooks(settings: StoreSettings, resources: ExitStack) -> StoreHooks:
    """Open the hooks that `settings` name, and register them with `resources`, which closes them. Raises ConfigError if
    a hook cannot be found."""

    def open_all(paths: Sequence[str], setting: str) -> Iterator[Hook]:
        for path in paths:
            hook = Hook(path, setting, settings.hook_timeout_ms / 1000)
            resources.callback(hook.close)
            yield hook

    put = tuple(open_all(settings.put_hooks, "put_hooks"))
    return StoreHooks(put, tuple(open_all(settings.consume_hooks, "consume_hooks")))


class HookedWrite:
    """Passes batches of messages to the operator's put hooks (functions that may refuse messages) before `write` stores
    the batches."""

    def __init__(
        self,
        write: WriteBatches,
        hooks: Sequence[Hook],
        broker_name: str,
        *,
        must_succeed: bool,
        on_refused: Callable[[], None],
    ) -> None:
        """`must_succeed`: True to refuse messages if a put hook fails (raises an exception or takes too long).
        `on_refused` is called once for each append whose messages are refused; nothing of such an append is stored."""
        self._write, self._hooks, self._broker_name = write, hooks, broker_name
        self._must_succeed, self._on_refused = must_succeed, on_refused

    def __call__(self, batches: Sequence[EncodedBatch], timeout_s: float) -> Written:
        """Pass the batches to the hooks, then write them.

        Errors raised before anything is written: MessageRefusedError if a hook refuses a message, and SystemBusyError
        if a hook fails and hooks must succeed. Raises MessageIllegalError, also before anything is written, if the
        record of a delayed or half message cannot be read.
        """
        try:
            shown = [one for batch in batches for one in self._shown(batch)]
            if shown:
                self._ask(shown)
        except (MessageIllegalError, SystemBusyError):
            self._on_refused()
            raise
        return self._write(batches, timeout_s)

    def _ask(self, shown: Sequence[PutBatch]) -> None:
        for hook in self._hooks:
            succeeded = hook.call(shown)
            if not succeeded and self._must_succeed:
                raise SystemBusyError(
                    f"the store's hook {hook.path} failed, and put_hooks_must_succeed is on, so nothing was "
                    "stored; send again later, and see the store's log and `raymq status --json`"
                )
            # If the call of a hook failed, ignore its refusals of messages: the call may still be running and may add
            # more.
            refused = [(batch, dict(batch.refusals)) for batch in shown if batch.refusals] if succeeded else []
            if refused:
                hook.count_refusals(sum(len(reasons) for _, reasons in refused))
                batch, reasons = refused[0]
                raise MessageRefusedError(hook.path, batch.topic, reasons[min(reasons)])

    def _shown(self, batch: EncodedBatch) -> Iterator[PutBatch]:
        """Yield the batch as hooks receive it. It is a copy, because a slow hook may still read it after the buffer is
        reused for another request."""
        topic = batch.topic
        if is_system_topic(topic) and not names_real_topic(topic):
            return
        validate_batch(batch)
        producer_id = "" if batch.producer is None else batch.producer.producer_id
        records = bytes(batch.records)
        if not names_real_topic(topic):
            yield PutBatch(self._broker_name, topic, batch.queue_id, records, producer_id)
            return
        # Group delayed messages by destination queue: messages of different topics share the queue of their delay
        # level.
        for (real_topic, real_queue_id), part in groupby(
            _with_place(records, batch.sizes.tolist()), lambda one: one[0]
        ):
            joined = b"".join([record for _, record in part])
            if real_topic:
                yield PutBatch(self._broker_name, real_topic, real_queue_id, joined, producer_id)


def _with_place(records: bytes, sizes: Sequence[int]) -> Iterator[tuple[tuple[str, int], bytes]]:
    """Yield each record with its destination topic and queue id; "" and 0 for a record without a destination, such as a
    recall."""
    position = 0
    for size in sizes:
        record = records[position : position + size]
        position += size
        try:
            properties = decode_record(record, check_crc=False).system_properties
            queue_id = properties.get(PROPERTY_REAL_QUEUE_ID, "0")
            place = (properties.get(PROPERTY_REAL_TOPIC, ""), int(queue_id))
        except (RecordError, ValueError) as error:
            raise MessageIllegalError(
                f"the record of a delayed message or a half message cannot be read: {error}; nothing was stored"
            ) from None
        yield place, record


class CarryOutFetches(Protocol):
    """Protocol of a function that carries out fetches, as FetchService.fetch does."""

    def __call__(
        self, requests: Sequence[FetchRequest], *, max_bytes: int, wait_s: float, patient: bool = False
    ) -> list[FetchResult]: ...


class HookedFetches:
    """Fetches messages by the function `fetch`, and shows them to the consume hooks before it returns them."""

    def __init__(self, fetch: CarryOutFetches, hooks: Sequence[Hook], broker_name: str) -> None:
        self._fetch, self._hooks, self._broker_name = fetch, hooks, broker_name

    def __call__(
        self, requests: Sequence[FetchRequest], *, max_bytes: int, wait_s: float, patient: bool = False
    ) -> list[FetchResult]:
        """Fetch messages with the function `fetch` that this object was created with, and pass the messages to the
        consume hooks."""
        results = self._fetch(requests, max_bytes=max_bytes, wait_s=wait_s, patient=patient)
        shown = [
            FetchedBatch(
                self._broker_name,
                request.topic,
                request.queue_id,
                bytes(result.records),
                queue_offset=request.queue_offset,
                next_offset=result.next_offset,
            )
            for request, result in zip(requests, results, strict=True)
            if result.status is PullStatus.FOUND and result.records and not is_system_topic(request.topic)
        ]
        if shown:
            for hook in self._hooks:
                hook.call(shown)
        return results
