"""PullConsumer reads its group's queues, or chosen queues, in the user's process. The program gets messages with
`poll`.

A revoked queue is released only inside `poll`, `commit` or `close`. When the program calls one of these, it has
finished with the messages of earlier polls. The threads and calls are in raymq.client.consumer.pull.engine; the asyncio
variant is raymq.client.consumer.pull.async_consumer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from raymq.common.numbers import POINT_IN_TIME_MS, POSITIVE, TIME_S, bounded, number_in
from raymq.common.parallel import aside

if TYPE_CHECKING:
    import pyarrow as pa

    from raymq.records.kernels.column_bodies import BodyType
    from raymq.records.kernels.columns import Unreadable


class PullConsumerBase(OfProcess):
    """The non-blocking methods that PullConsumer and AsyncPullConsumer share."""

    def __init__(self, engine: PullEngine) -> None:
        self.group = engine.names.unwrap(engine.settings.group)
        self._engine = engine

    def unsubscribe(self, topic: str) -> None:
        """Stop polling messages of a topic. The topic's queues move to other members of the group when this program
        next polls or commits. Raises ClientStateError if the topic is not subscribed."""
        self._engine.unsubscribe(topic)

    @direct
    def assignment(self) -> list[MessageQueue]:
        """Return the queues that this consumer holds now, sorted."""
        return self._engine.assignment()

    @direct
    def acknowledge(self, messages: Iterable[MessageExt]) -> None:
        """Mark messages as done, in any order, from any thread. Requires a consumer with ``acknowledge_each=True``.

        Every `auto_commit_interval_s`, each queue is committed up to the first message that a poll returned and the
        program has not acknowledged. If a queue has moved to another member, acknowledgements of its messages are
        ignored, and that member receives the messages again. Returns at once. Raises ClientStateError if the consumer
        was made without `acknowledge_each`.
        """
        self._engine.acknowledge(messages)

    @direct
    def position(self, queue: MessageQueue) -> int:
        """Return this consumer's position in a queue that it holds: the offset of the next message that a poll
        returns."""
        return self._engine.position(queue)

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Stop fetching and returning messages of these queues until `resume`. This consumer keeps the queues as long
        as the group assigns them to it. A queue that is lost and granted again is not paused."""
        self._engine.pause(list(queues))

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        """Resume queues that `pause` has paused: fetch and return their messages again."""
        self._engine.resume(list(queues))

    @direct
    def paused(self) -> list[MessageQueue]:
        """Return the paused queues, sorted."""
        return self._engine.paused()


class PullConsumer(PullConsumerBase):
    """A blocking pull consumer, created by `Client.pull_consumer`. One thread polls at a time; any thread may call the
    other methods.

    Methods about this consumer's position in a queue (position, seek, pause, …) raise ClientStateError for a queue that
    this consumer does not hold now. After `close` every method raises ClientStateError.
    """

    def __init__(self, engine: PullEngine) -> None:
        super().__init__(engine)
        self._wakeup = Wakeup()
        engine.on_wakeup = self._wakeup.set

    # Methods that choose the topics or queues to consume

    def subscribe(self, topic: str, expression: Expression = "*") -> None:
        """Subscribe to a topic, and share its queues with the members of the group.

        `expression` chooses messages by tag, for example ``"paid || refunded"``; by properties, ``raymq.sql("price >
        5")``; or by a predicate (`raymq.predicate`). A second call for a topic replaces its expression, from the next
        poll on.

        Raises TopicNotExistError if the topic does not exist, and IllegalNameError or InvalidArgumentError if an
        argument is invalid. Raises ClientStateError after `assign`, or if members of the group subscribe to the topic
        with another expression.
        """
        self._engine.subscribe(topic, expression)

    def assign(self, queues: Iterable[MessageQueue], expression: Expressions = "*") -> None:
        """Consume exactly these queues, without being a member of the group. Other consumers keep their queues.

        Offsets are read and committed under the group's name, so other consumers must not use these queues.
        `expression` chooses messages by tag or by `raymq.sql`, for all topics or by topic. A second call replaces the
        list of queues. A queue in both lists continues at its position. With auto_commit, the second call first commits
        all messages that polls have returned.

        Raises InvalidArgumentError if a queue does not exist, TopicNotExistError if a queue's topic does not exist, and
        ClientStateError after `subscribe`.
        """
        self._engine.assign(queues, expression)

    # Methods that return messages

    @unwrapped
    def poll(self, max_messages: int = 500, timeout_s: float = 1.0) -> list[MessageExt]:
        """Return up to `max_messages` messages. Waits up to `timeout_s` for the first message, and returns an empty
        list if none arrives.

        Messages of one queue are returned in order. With auto_commit, this call marks the messages of earlier polls as
        done. A message that cannot be read is returned in its place: its `body` raises BodyUnreadableError, and its
        `body_error` is that error.

        Raises InvalidArgumentError unless `max_messages` is a whole number of at least 1 and `timeout_s` is at least 0.
        Raises ClientStateError after `close`, or if the consumer has nothing to consume. Raises DataLossError each time
        that a queue's next message could not be read, and PredicateFailedError each time that the queue's predicate
        failed; the other queues continue. Raises NoPermissionError while the group may not consume (consume_enable) or
        may not read a topic (`raymq group forbid`): at once if this concerns all queues, and otherwise instead of an
        empty list. Raises the group's error if the group cannot be joined within the timeout. If a broker has refused
        an automatic commit, raises the broker's error once.
        """
        max_messages = number_in("max_messages", max_messages, POSITIVE)
        timeout_s = number_in("timeout_s", timeout_s, TIME_S)
        turn = PollTurn()
        try:
            messages = as_messages(aside(turn.step, self._poll, turn, decode_messages, max_messages, timeout_s))
        except BaseException:
            # Mark the poll as abandoned. This is a single assignment, because a signal handler cannot interrupt it.
            turn.abandoned = True
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
        """Poll as `poll` does, and return an Arrow table with the columns of `raymq.records.kernels.columns.SCHEMA`. No
        Python object is created per message.

        The bodies are a `binary_view` column that refers to the bytes that were read. On the storage actor's node these
        are bytes of the mapped commit log: a deleted file keeps its disk space for as long as the table exists. With
        `body_type` "binary" the bodies are copied. On another node a table has at most the messages that are buffered;
        a larger `threshold_all_bytes` allows larger tables. A table ends when its compressed bodies reach about 64 MiB
        after decompression; the next table has the following messages.

        `columns`: the columns to return, which may include `raymq.records.kernels.columns.MORE_COLUMNS`. A message that
        cannot be read is a row with a null body, and the column "error" has the reason. With `unreadable` "raise" a
        table ends before such a message, and the next poll raises BodyUnreadableError; `seek` skips the message.

        Raises the errors of `poll`. Raises ClientStateError if the consumer was made with `acknowledge_each`, because a
        row of a table cannot be acknowledged.
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
        """Iterate over messages until the consumer is closed. With auto_commit, a message is committed only after the
        program has requested the next message. So if the program leaves the loop early, no message is skipped."""
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
        """Run one poll in a helper thread, which no signal handler interrupts."""
        engine, polls = self._engine, self._engine.polls
        polls.begin(turn)
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

    # Methods that commit offsets

    def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> dict[MessageQueue, int]:
        """Commit all messages that polls have returned, or commit the given `offsets` (offset of the next message to
        consume, per queue).

        Returns the offsets that are now committed, durably. The result omits queues that another member has taken over,
        and queues whose offset was reset. An offset below the committed offset is ignored: use `seek` to move
        backwards.

        Raises InvalidArgumentError if polls have not reached a given offset, and ClientStateError if this consumer does
        not hold a given queue. After any other error the call may be repeated.
        """
        return self._engine.commit(offsets)

    @bounded(delay_level=DELAY_LEVEL, max_reconsume_times=RECONSUME_TIMES)
    def send_back(self, message: MessageExt, *, delay_level: int = 0, max_reconsume_times: int = -1) -> None:
        """Deliver a message to the group again, from the group's retry topic `%RETRY%group`, to which members must
        subscribe.

        The message is delivered after the delay of `delay_level`. With level 0 the delay grows with each send-back of
        the message. The message moves to the dead-letter topic `%DLQ%group` instead after `max_reconsume_times`
        send-backs (negative: the group's retry_max_times), or if `delay_level` is negative. Durable on return. The
        original message must still be acknowledged or committed.

        Raises GroupNotExistError if the group does not exist, and MessageIllegalError if the message's properties
        become too long, because a send-back adds some. After an error the message may have been sent back.
        """
        self._engine.send_back(message, delay_level, max_reconsume_times)

    def committed(self, queue: MessageQueue) -> int | None:
        """Return the group's committed offset of a queue. This consumer need not hold the queue. Returns None if the
        group has committed no offset."""
        return self._engine.committed(queue)

    # Methods that read and change positions in queues

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Make the next poll of a queue continue at `offset`, and commit this offset as if polls had reached it. Raises
        OffsetOutOfRangeError if the queue does not hold `offset`."""
        self._engine.seek(queue, offset)

    def seek_to_begin(self, queue: MessageQueue) -> None:
        """Continue reading a queue at the first message that the queue still holds."""
        self._engine.seek_to_begin(queue)

    def seek_to_end(self, queue: MessageQueue) -> None:
        """Continue reading a queue at its end, so that `poll` returns only messages that are stored after this
        call."""
        self._engine.seek_to_end(queue)

    def lag(self) -> dict[MessageQueue, int]:
        """Return the number of messages after this consumer's position, for each held queue."""
        return self._engine.lag()

    # Methods about any queue, whether this consumer holds it or not

    def fetch_message_queues(self, topic: str) -> list[MessageQueue]:
        """Return the currently readable queues of a topic, sorted. Raises TopicNotExistError if the topic does not
        exist, and IllegalNameError if the topic's name is illegal."""
        return self._engine.lookup.queues(topic)

    def begin_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """Return the lowest offset of each queue that is still stored."""
        return self._engine.lookup.begin_offsets(queues)

    def end_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """Return the offset of the next message to be stored in each queue."""
        return self._engine.lookup.end_offsets(queues)

    @bounded(timestamp_ms=POINT_IN_TIME_MS)
    def offset_for_timestamp(self, queue: MessageQueue, timestamp_ms: int) -> int:
        """Return the offset of the first message stored at or after a time in ms since 1970. The result is within the
        queue's offsets."""
        return self._engine.lookup.offsets_for_times({queue: timestamp_ms})[queue]

    @bounded(times_ms=POINT_IN_TIME_MS)
    def offsets_for_times(self, times_ms: Mapping[MessageQueue, int]) -> dict[MessageQueue, int]:
        """Return the offsets of several queues for timestamps, as `offset_for_timestamp` does. `times_ms`: the
        timestamp of each queue."""
        return self._engine.lookup.offsets_for_times(times_ms)

    def register_queue_change_listener(self, topic: str, callback: QueueChangeListener) -> None:
        """Register a listener: `callback(topic, queues)` is called when a check finds that the topic's queues have
        changed.

        Checks run every `queue_check_interval_s`. One separate thread of the consumer runs all its callbacks, and logs
        their exceptions.
        """
        self._engine.watch.register(topic, callback)

    # Methods that close the consumer

    def close(self) -> None:
        """Leave the group and stop the threads. With auto_commit, first commit all messages that polls have returned.

        If an exception leaves the `with` block, the messages of the last poll are not committed: they are delivered
        again. Idempotent.
        """
        self._engine.close()

    def __enter__(self) -> PullConsumer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        aside(self._engine.close, finished=kind is None)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a raymq consumer cannot be pickled: call raymq.connect().pull_consumer(...) in the process that "
            "uses the consumer"
        )
