"""The questions at a broker that wait for a client to take them, and the clients that poll for questions.

A broker cannot call a program, so a client polls for questions. A question is dropped if its asker withdraws it.
Bounded: few questions wait for a client that takes none, and silent clients are forgotten. Time is an argument. Nothing
survives the broker: the asker asks again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from raymq.common.errors import SystemBusyError
from raymq.common.members.questions import QUESTION_WAIT_S, Question

LISTENS_S: Final = QUESTION_WAIT_S + 10.0
"""A client that has not polled for this time does not receive questions."""
QUESTIONS_WAITING_MAX: Final = 8
"""The most questions that wait for one client."""


@dataclass(slots=True)
class _Client:
    asked_s: float
    waiting: list[Question] = field(default_factory=list)


class QuestionBoard:
    """The questions of one broker. For one thread at a time."""

    def __init__(self) -> None:
        # Ordered by the time of the last poll, so that silent clients come first.
        self._clients: dict[str, _Client] = {}
        self._open: dict[str, str] = {}
        """The clients of unanswered questions, by ticket."""

    def take(self, client_id: str, now_s: float) -> list[Question]:
        """Return the questions that wait for a client, and record that the client polls."""
        client = self._clients.pop(client_id, None) or _Client(now_s)
        self._clients[client_id] = client
        client.asked_s = now_s
        taken, client.waiting = client.waiting, []
        for name, other in list(self._clients.items()):
            if now_s - other.asked_s < LISTENS_S:
                break
            del self._clients[name]
        return taken

    def put(self, client_id: str, question: Question, now_s: float) -> bool:
        """Queue a question for a client. Returns False if the client does not poll here. SystemBusyError."""
        client = self._clients.get(client_id)
        if client is None or now_s - client.asked_s >= LISTENS_S:
            return False
        if len(client.waiting) >= QUESTIONS_WAITING_MAX:
            raise SystemBusyError(f"{len(client.waiting)} questions wait for client {client_id} already; ask later")
        client.waiting.append(question)
        self._open[question.ticket] = client_id
        return True

    def answered(self, client_id: str, ticket: str) -> bool:
        """Close a question. Returns True if it was open and for this client."""
        if self._open.get(ticket) != client_id:
            return False
        del self._open[ticket]
        return True

    def withdraw(self, ticket: str) -> None:
        """Drop a question whose asker no longer waits."""
        client = self._clients.get(self._open.pop(ticket, ""))
        if client is not None:
            client.waiting = [question for question in client.waiting if question.ticket != ticket]

    def leave(self, client_id: str) -> None:
        """Record that a client has ended."""
        self._clients.pop(client_id, None)
