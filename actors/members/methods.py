"""The methods of the Broker actor for queries to clients (raymq.common.members.questions).

A client polls for queries over the broker's lane (direct socket connection), where a poll needs no thread while it
waits. The sender of a query waits in a thread of the actor, so only few senders may wait at the same time. No query
survives the broker.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import partial
from typing import Final

from actors.core.members.question_board import QuestionBoard
from raymq.common.errors import InvalidArgumentError, RequestTimeoutError, SystemBusyError
from raymq.common.members.questions import MEMBER_ANSWER_MAX_BYTES, QUESTION_WAIT_S, Question
from raymq.remoting.lane.calls import encode_result
from raymq.remoting.lane.connection import LaneRequest
from raymq.remoting.lane.loop import Loop

ASKS_MAX: Final = 8
"""Maximum number of queries whose senders wait for an answer at the same time; each sender occupies a thread of the
actor."""
ASK_MAX_S: Final = 30.0
"""Maximum time, in seconds, that an administrator's call waits until the client has answered its query."""


class QuestionMethods:
    """The Broker's methods for queries to clients; the Broker actor inherits from this class. Thread-safe."""

    def __init__(self, loop: Callable[[], Loop]) -> None:
        """`loop` is a function that returns the event loop of the broker's lane (direct socket connection). It is
        called only after this loop exists."""
        self._question_loop = loop
        self._questions = QuestionBoard()
        self._questions_lock = threading.Lock()
        """Lock that guards the clients' waiting polls, the senders that wait for answers, and the waiting queries
        (Question)."""
        self._held: dict[str, LaneRequest] = {}
        """By client id: the client's poll that waits until a query for this client arrives."""
        self._askers: dict[str, Future[bytes]] = {}
        """The futures of the senders that wait for a client's answer to their query, by the query's ticket."""

    def _take_questions_soon(self, lane: LaneRequest, client_id: str, wait_s: float) -> None:
        """Take the queries that wait for a client, and record the client's poll. Safe to repeat.

        The poll is answered when a query arrives, or after `wait_s`, at most QUESTION_WAIT_S.
        """
        now_s = time.monotonic()
        with self._questions_lock:
            taken = self._questions.take(client_id, now_s)
            before = self._held.pop(client_id, None)
            if not taken:
                self._held[client_id] = lane
        if before is not None:
            # Answer the client's earlier poll without queries. The client has polled again, so the connection of the
            # earlier poll has broken.
            before.answer(encode_result([]))
        if taken:
            lane.answer(encode_result(taken))
        else:
            end_s = now_s + min(max(wait_s, 0.0), QUESTION_WAIT_S)
            self._question_loop().call_at(end_s, partial(self._end_call, client_id, lane))

    def _end_call(self, client_id: str, lane: LaneRequest) -> None:
        """Answer a client's waiting poll without queries, because its wait time is over."""
        with self._questions_lock:
            if self._held.get(client_id) is not lane:
                return
            del self._held[client_id]
        lane.answer(encode_result([]))

    def answer_question(self, client_id: str, ticket: str, answer: bytes) -> None:
        """Pass a client's answer, an encoded MemberAnswer, to the sender of the query with the id `ticket`.

        Drops the answer if no sender waits for it. Raises InvalidArgumentError if the answer is too long.
        """
        if len(answer) > MEMBER_ANSWER_MAX_BYTES:
            raise InvalidArgumentError(
                f"an answer to a query may have at most {MEMBER_ANSWER_MAX_BYTES} bytes, not {len(answer)}"
            )
        with self._questions_lock:
            asker = self._askers.pop(ticket, None) if self._questions.answered(client_id, ticket) else None
        if asker is not None:
            asker.set_result(answer)

    def ask_client(self, client_id: str, question: Question, timeout_s: float) -> bytes | None:
        """Send a query to a live client, and wait up to `timeout_s` (at most ASK_MAX_S) for the answer, an encoded
        MemberAnswer.

        Returns None if the client does not poll this broker, so that it did not get the query. Raises
        RequestTimeoutError if the client did not answer, although it may have got the query. Raises SystemBusyError if
        too many senders wait.
        """
        asker: Future[bytes] = Future()
        question = replace(question, ticket=secrets.token_hex(16))
        wait_s = min(timeout_s, ASK_MAX_S)
        with self._questions_lock:
            if len(self._askers) >= ASKS_MAX:
                raise SystemBusyError(f"{ASKS_MAX} queries to clients already wait for answers; try again later")
            if not self._questions.put(client_id, question, time.monotonic()):
                return None
            self._askers[question.ticket] = asker
        try:
            self._tell(client_id)
            return asker.result(wait_s)
        except FutureTimeoutError:
            raise RequestTimeoutError(
                f"the query to client {client_id} about group {question.group!r}", wait_s
            ) from None
        finally:
            with self._questions_lock:
                self._askers.pop(question.ticket, None)
                self._questions.withdraw(question.ticket)

    def _tell(self, client_id: str) -> None:
        """Answer the long poll of a client that waits for queries, because a query to this client has arrived."""
        with self._questions_lock:
            lane = self._held.pop(client_id, None)
            taken = [] if lane is None else self._questions.take(client_id, time.monotonic())
        if lane is not None:
            lane.answer(encode_result(taken))

    def _client_has_ended(self, client_id: str) -> None:
        """Remove a client that has shut down from the clients that poll for queries, and answer its waiting
        poll."""
        with self._questions_lock:
            self._questions.leave(client_id)
            lane = self._held.pop(client_id, None)
        if lane is not None:
            lane.answer(encode_result([]))
