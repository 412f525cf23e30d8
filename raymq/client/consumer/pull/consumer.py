"""PullConsumer reads its group's queues, or chosen ones, in the user's process; the program gets messages with `poll`.

A queue that is to go to another member is released inside `poll`, `commit` or `close`: only then has the program
finished with the messages of earlier polls. The threads and calls are in raymq.client.consumer.pull.engine; the twin
for asyncio is raymq.client.consumer.pull.async_consumer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from raymq.client.consumer.pull.engine import PullEngine
from raymq.client.consumer.pull.fetched_records import (
    Decode,
    Found,
    PolledRecords,
    as_messages,
    as_table,
    decode_messages,
    found,
)
from raymq.client.consumer.pull.poll_turn import PollTurn, Wakeup
from raymq.client.consumer.pull.settings import DELAY_LEVEL, RECONSUME_TIMES
from raymq.client.consumer.queue_lookup import QueueChangeListener
from raymq.client.consumer.subscription import Expression, Expressions
from raymq.common.closing import OfProcess, direct, unwrapped
from raymq.common.errors import ClientStateError
from raymq.common.message import MessageExt, MessageQueue
from raymq.common.numbers import POSITIVE, TIME_S, bounded, number_in
from raymq.common.parallel import aside

if TYPE_CHECKING:
    import pyarrow as pa

    from raymq.records.kernels.column_bodies import BodyType
    from raymq.records.kernels.columns import Unreadable


class PullConsumerBase(OfProcess):
    """The methods of PullConsumer and AsyncPullConsumer that wait for nothing."""

    def __init__(self, engine: PullEngine) -> None:
        self.group = engine.names.unwrap(engine.settings.group)
        self._engine = engine

    def unsubscribe(self, topic: str) -> None:
        """Poll nothing more of a topic; its queues go to other members once this program polls or commits again.
        ClientStateError without a subscription."""
        self._engine.unsubscribe(topic)

    @direct
    def assignment(self) -> list[MessageQueue]:
        """The queues this consumer holds now, sorted."""
        return self._engine.assignment()

    @direct
    def acknowledge(self, messages: Iterable[MessageExt]) -> None:
        """Count messages as done, in any order, from any thread; for a consumer with ``acknowledge_each=True``.

        Every `auto_commit_interval_s`, each queue is committed up to its first message that a poll returned and that is
        not acknowledged. Messages of a queue that another member has got meanwhile count for nothing: it gets them
        again. Waits for nothing. ClientStateError without acknowledge_each.
        """
        self._engine.acknowledge(messages)

    @direct
    def position(self, queue: MessageQueue) -> int:
        """The offset the next poll returns from a queue this consumer holds."""
        return self._engine.position(queue)

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Neither fetch nor return these queues until `resume`. They stay this consumer's as long as the group leaves
        them to it; a queue that is lost and granted again is not paused."""
        self._engine.pause(list(queues))

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Fetch and return these queues again."""
        self._engine.resume(list(queues))

    @direct
    def paused(self) -> list[MessageQueue]:
        """The queues that are paused, sorted."""
        return self._engine.paused()


class PullConsumer(PullConsumerBase):
    """Made by `Client.pull_consumer`. One thread polls at a time; the rest may be called from any.

    Methods about this consumer's position in a queue (position, seek, pause, …) raise ClientStateError for a queue that
    it does not hold now. After `close` every method raises ClientStateError.
    """

    def __init__(self, engine: PullEngine) -> None:
        super().__init__(engine)
        self._wakeup = Wakeup()
        engine.on_wakeup = self._wakeup.set

    # What is consumed

    def subscribe(self, topic: str, expression: Expression = "*") -> None:
        """Consume a topic's messages whose tag is in `expression`, for example ``"paid || refunded"``, or those that
        pass it: ``raymq.sql("price > 5")``, or a predicate (`raymq.predicate`). The members of the group share the
        topic's queues.

        TopicNotExistError, IllegalNameError, InvalidArgumentError, ClientStateError after `assign`, or where members of
        the group subscribe to the topic with another expression. A second call for a topic replaces the first, from the
        next poll on.
        """
        self._engine.subscribe(topic, expression)

    def assign(self, queues: Iterable[MessageQueue], expression: Expressions = "*") -> None:
        """Consume exactly these queues, without being a member of the group: no other consumer gives way.

        Offsets are read and committed under the group's name, so other consumers must leave these queues alone.
        `expression` chooses by tag or by `raymq.sql`, for all topics or by topic. Another call replaces the list;
        queues in both go on where they are, and with auto_commit everything polls have returned is committed first.
        InvalidArgumentError for a queue that does not exist, TopicNotExistError, ClientStateError after `subscribe`.
        """
        self._engine.assign(queues, expression)

    # Messages

    @unwrapped
    def poll(self, max_messages: int = 500, timeout_s: float = 1.0) -> list[MessageExt]:
        """Up to `max_messages` messages; waits up to `timeout_s` for the first, and returns an empty list after that.

        Messages of one queue come in order. With auto_commit, what earlier polls returned counts as done from now on.
        Raises InvalidArgumentError unless `max_messages` is a whole number from 1 and `timeout_s` is from 0;
        ClientStateError when closed, or with nothing to consume; DataLossError, while the other queues' messages go on
        coming, each time that a queue's next message could not be read, and PredicateFailedError likewise, where its
        predicate failed on it; NoPermissionError while
        the group may not consume (consume_enable), or is forbidden to read a topic (`raymq group forbid`): at once if
        that concerns all queues of this consumer, else when it would return nothing; the error of the group when it
        cannot be joined within the timeout; and, once, an error with which the brokers have refused an automatic
        commit.

        A message that cannot be read is returned in its place, and the consumer goes on behind it: `body` raises
        BodyUnreadableError, and `body_error` has that error.
        """
        max_messages = number_in("max_messages", max_messages, POSITIVE)
        timeout_s = number_in("timeout_s", timeout_s, TIME_S)
        decode = partial(decode_messages, on_unreadable=self._engine.polls.unreadable.note)
        turn = PollTurn()
        try:
            messages = as_messages(aside(turn.step, self._poll, turn, decode, max_messages, timeout_s))
        except BaseException:
            turn.abandoned = True  # a single store: nothing can come between
            raise
        return messages

    @unwrapped
    def poll_table(
        self,
        max_messages: int = 65_536,
        timeout_s: float = 1.0,
        *,
        body_type: BodyType = "binary_view",
        columns: Sequence[str] | None = None,
        unreadable: Unreadable = "null",
    ) -> pa.Table:
        """Poll as `poll` does, and return an Arrow table with the columns of `raymq.records.kernels.columns.SCHEMA`,
        made without an object per message.

        The bodies are a `binary_view` column that refers to the bytes that were read: on the storage actor's node to
        the mapped commit log, whose file keeps its space on the disk, even when it is deleted, for as long as the table
        is kept. With `body_type` "binary" they are copied. ClientStateError with acknowledge_each: a row of a table
        cannot be acknowledged. Elsewhere a table has at most the messages that are
        buffered; a larger `threshold_all_bytes` makes larger tables. Compressed bodies of about 64 MiB, decompressed,
        end a table, too; the messages behind them are in the next table.

        `columns`: these columns alone, also of `raymq.records.kernels.columns.MORE_COLUMNS`. A message that cannot be
        read is a row with a null body, and the column "error" has the reason. With `unreadable` "raise" a table ends
        before such a message, and the next poll raises BodyUnreadableError; `seek` goes past the message.
        """
        max_messages = number_in("max_messages", max_messages, POSITIVE)
        timeout_s = number_in("timeout_s", timeout_s, TIME_S)
        decode = self._engine.polls.table_decoder(body_type, columns, unreadable)
        turn = PollTurn()
        try:
            table = as_table(aside(turn.step, self._poll, turn, decode, max_messages, timeout_s), body_type, columns)
        except BaseException:
            turn.abandoned = True
            raise
        return table

    def __iter__(self) -> Iterator[MessageExt]:
        """Iterate over messages, one after another, until the consumer is closed. With auto_commit, a message counts as
        done when the next one is asked for, so that leaving the loop skips nothing."""
        while not self._engine.closed:
            try:
                messages = self.poll(max_messages=1)
            except ClientStateError:
                if self._engine.closed:
                    return
                raise
            yield from messages

    def _poll(
        self, turn: PollTurn, decode: Decode[Found], max_messages: int, timeout_s: float
    ) -> list[tuple[PolledRecords, Found]]:
        """Poll, in a thread that no signal handler interrupts."""
        engine, polls = self._engine, self._engine.polls
        polls.begin(turn, max_messages, timeout_s)
        taken: list[tuple[PolledRecords, Found]] = []
        try:
            deadline_s = time.monotonic() + timeout_s
            while not (found(taken) or engine.closed or turn.abandoned):
                self._wakeup.clear()
                slices = polls.peek(max_messages)
                if slices:
                    taken = polls.take(turn, polls.decode(decode, slices))
                elif (left_s := deadline_s - time.monotonic()) <= 0:
                    break
                else:
                    polls.raise_loss()
                    self._wakeup.wait(polls.descriptors(), min(left_s, polls.wait_max_s()))
        finally:
            polls.end(turn)
        if not taken:
            polls.raise_failure()
        return taken

    # Committing

    def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> dict[MessageQueue, int]:
        """Commit everything that polls have returned, or up to these offsets (of the next message to consume).

        Returns the offsets that are committed now, durably; without the queues that another member has taken over or
        somebody has reset meanwhile. An offset behind the committed one changes nothing: seek back to go back. Raises
        InvalidArgumentError for an offset polls have not come to, ClientStateError for a queue that is not held, and
        after any other error it may be called again.
        """
        return self._engine.commit(offsets)

    @bounded(delay_level=DELAY_LEVEL, max_reconsume_times=RECONSUME_TIMES)
    def send_back(self, message: MessageExt, *, delay_level: int = 0, max_reconsume_times: int = -1) -> None:
        """Have the group get a message again, from its topic `%RETRY%group`, which members must subscribe to.

        That is after `delay_level`, or with 0 the later the more often the message was sent back. After
        `max_reconsume_times` times (negative: the group's retry_max_times), or with a negative `delay_level`, it goes
        to the dead letters `%DLQ%group` instead. Durable on return; the message itself is still to be acknowledged or
        committed. A call that raised may have been done. GroupNotExistError, MessageIllegalError.
        """
        self._engine.send_back(message, delay_level, max_reconsume_times)

    def committed(self, queue: MessageQueue) -> int | None:
        """The group's committed offset in any queue, None where there is none."""
        return self._engine.committed(queue)

    # Positions

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on at `offset`, and commit that as if polls had come to it. OffsetOutOfRangeError outside what the queue
        holds."""
        self._engine.seek(queue, offset)

    def seek_to_begin(self, queue: MessageQueue) -> None:
        """Go on at the first message the queue still holds."""
        self._engine.seek_to_begin(queue)

    def seek_to_end(self, queue: MessageQueue) -> None:
        """Go on behind the last message."""
        self._engine.seek_to_end(queue)

    def lag(self) -> dict[MessageQueue, int]:
        """The number of messages behind this consumer's position, by held queue."""
        return self._engine.lag()

    # Any queue

    def fetch_message_queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic now, sorted. TopicNotExistError, IllegalNameError."""
        return self._engine.lookup.queues(topic)

    def begin_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """The first offset that each queue still holds."""
        return self._engine.lookup.begin_offsets(queues)

    def end_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """The offset that the next message of each queue will get."""
        return self._engine.lookup.end_offsets(queues)

    def offset_for_timestamp(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """The first offset stored at or after a time in ms since 1970, within what the queue holds."""
        return self._engine.lookup.offsets_for_times({queue: timestamp_ms})[queue]

    def offsets_for_times(self, times_ms: Mapping[MessageQueue, int]) -> dict[MessageQueue, int]:
        """The offsets of several queues, each for its own time, as `offset_for_timestamp` says."""
        return self._engine.lookup.offsets_for_times(times_ms)

    def register_queue_change_listener(self, topic: str, callback: QueueChangeListener) -> None:
        """Call `callback(topic, queues)` when the topic's queues differ from those at the check before.

        Checks are every `queue_check_interval_s`. All callbacks of a consumer run in one thread of its own, beside the
        one that polls; their exceptions are logged.
        """
        self._engine.watch.register(topic, callback)

    # Life

    def close(self) -> None:
        """Leave the group and end the threads; with auto_commit, first commit everything that polls have returned.

        If an exception leaves the `with`, the messages of the last poll are not committed: they are delivered again.
        Idempotent.
        """
        self._engine.close()

    def __enter__(self) -> PullConsumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        aside(self._engine.close, finished=kind is None)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a raymq consumer cannot be pickled: call raymq.connect().pull_consumer(...) where it is used")
