"""Polls a broker for administrators' queries to this client, and answers them (raymq.common.members.questions).

One thread per client with consumers holds a long poll at one broker. Up to ANSWERING_MAX other threads compute the
answers; they exist only while queries are open. If the broker does not respond, the thread polls the next broker. If
queries cannot reach a client, the client still consumes.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Final

from raymq.common.errors import RaymqError
from raymq.common.members.questions import QUESTION_WAIT_S, MemberAnswer, Question, encode_answer
from raymq.common.parallel import start_daemon
from raymq.common.retry import Backoff
from raymq.remoting.broker_client import broker_client

QUESTION_CALL_TIMEOUT_S: Final = QUESTION_WAIT_S + 10.0
SEND_ANSWER_TIMEOUT_S: Final = 5.0
QUESTION_PAUSE_S: Final = 1.0
"""Minimum time in seconds between two long polls that return no query. The pause prevents a busy loop if the polls
return immediately."""
QUESTION_PAUSE_MAX_S: Final = 10.0
"""Maximum pause in seconds between two polls for queries while no broker answers."""
ANSWERING_MAX: Final = 4
"""Maximum number of administrators' queries that a client answers at the same time; it refuses further queries."""
LISTENER_CLOSE_TIMEOUT_S: Final = 2.0

logger = logging.getLogger(__name__)


class QuestionListener:
    """Polls for administrators' queries to one client, from construction until `close`. Thread-safe."""

    def __init__(
        self,
        client_id: str,
        brokers: Callable[[], Iterable[str]],
        answer: Callable[[Question], MemberAnswer],
    ) -> None:
        """`brokers` returns the names of all brokers. `answer` computes the answer to an administrator's query; it runs
        in a separate thread."""
        self._client_id, self._brokers, self._answer = client_id, brokers, answer
        self._turn = zlib.crc32(client_id.encode())
        """Index, modulo the number of brokers, of the broker to poll. The first index is a hash of the client id, so
        that clients spread over all brokers."""
        self._stop = threading.Event()
        self._answering = threading.Semaphore(ANSWERING_MAX)
        # At the interpreter's exit no thread starts, and administrators' queries do not reach the client.
        self._thread = start_daemon(self._run, name="questions")

    def begin_close(self) -> None:
        """Stop asking the broker for administrators' queries. The broker ends a long poll that is in progress after the
        client has unregistered."""
        self._stop.set()

    def close(self) -> None:
        """Stop polling, and wait up to LISTENER_CLOSE_TIMEOUT_S for the polling thread to end. If the thread is in a
        long poll, it ends later. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(LISTENER_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        backoff = Backoff(QUESTION_PAUSE_S, QUESTION_PAUSE_MAX_S)
        while not self._stop.is_set():
            begun_s = time.monotonic()
            try:
                names = sorted(self._brokers())
                questions = self._take(names[self._turn % len(names)]) if names else []
            except RaymqError as error:
                logger.info("cannot receive administrators' queries now, retrying: %s", error)
                self._turn += 1
                self._stop.wait(backoff.next())
                continue
            # The polling code has a bug. The thread must survive the error, because otherwise no query would reach the
            # client.
            except Exception:
                logger.exception("cannot receive administrators' queries, retrying")
                self._stop.wait(QUESTION_PAUSE_MAX_S)
                continue
            backoff.reset()
            if not questions:
                self._stop.wait(max(0.0, begun_s + QUESTION_PAUSE_S - time.monotonic()))

    def _take(self, broker_name: str) -> list[Question]:
        questions: list[Question] = broker_client(broker_name).call(
            "take_questions", self._client_id, QUESTION_WAIT_S, timeout_s=QUESTION_CALL_TIMEOUT_S
        )
        for question in questions:
            refusal = self._begin_answer(broker_name, question)
            if refusal:
                self._send(broker_name, question, MemberAnswer(refusal))
        return questions

    def _begin_answer(self, broker_name: str, question: Question) -> str:
        """Start a thread that answers a query. Returns an empty string, or the reason why the client cannot answer."""
        if not self._answering.acquire(blocking=False):
            return f"the client is already answering {ANSWERING_MAX} queries, the maximum"
        try:
            started = start_daemon(self._reply, broker_name, question, name="answer")
        except RuntimeError as error:
            self._answering.release()
            return f"the client cannot start a thread that answers the query: {error}"
        if started is None:
            self._answering.release()
            return "the client's process is ending"
        return ""

    def _reply(self, broker_name: str, question: Question) -> None:
        try:
            try:
                answer = self._answer(question)
            except RaymqError as error:
                answer = MemberAnswer(str(error))
            # a bug in raymq made the answer fail: report the exception to the administrator who sent the query
            except Exception as error:
                logger.exception("cannot answer a query about group %s", question.group)
                answer = MemberAnswer(f"the query failed: {error!r}")
            self._send(broker_name, question, answer)
        finally:
            self._answering.release()

    def _send(self, broker_name: str, question: Question, answer: MemberAnswer) -> None:
        try:
            arguments = (self._client_id, question.ticket, encode_answer(answer))
            broker_client(broker_name).call("answer_question", *arguments, timeout_s=SEND_ANSWER_TIMEOUT_S)
        except RaymqError as error:
            logger.info("broker %s did not accept the answer to a query: %s", broker_name, error)
