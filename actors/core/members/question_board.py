"""The questions of a broker that wait for a client to take them, and the clients that listen.

A client listens while it asks for questions: a broker cannot call a program. A question that its asker withdraws is
gone. Bounded: a client that takes none has few questions waiting, and one that is silent is forgotten. Time comes in as
an argument. Nothing of it survives the broker: the asker asks again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from raymq.common.errors import SystemBusyError
from raymq.common.members.questions import QUESTION_WAIT_S, Question

LISTENS_S: Final = QUESTION_WAIT_S + 10.0
"""A client that has not asked for so long does not listen."""
QUESTIONS_WAITING_MAX: Final = 8
"""The most questions that wait for one client."""


@dataclass(slots=True)
class _Client:
    asked_s: float
    waiting: list[Question] = field(default_factory=list)


class QuestionBoard:
    """The questions of one broker. For one thread at a time."""

    def __init__(self) -> None:
        # In the order in which they asked last, so that the silent ones come first.
        self._clients: dict[str, _Client] = {}
        self._open: dict[str, str] = {}
        """The clients of the questions that have no answer, by ticket."""

    def take(self, client_id: str, now_s: float) -> list[Question]:
        """The questions that wait for a client, which listens."""
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
        """Let a question wait for a client. False if the client does not listen here. SystemBusyError."""
        client = self._clients.get(client_id)
        if client is None or now_s - client.asked_s >= LISTENS_S:
            return False
        if len(client.waiting) >= QUESTIONS_WAITING_MAX:
            raise SystemBusyError(f"{len(client.waiting)} questions wait for client {client_id} already; ask later")
        client.waiting.append(question)
        self._open[question.ticket] = client_id
        return True

    def answered(self, client_id: str, ticket: str) -> bool:
        """True if a question is open, and this client's: then it is open no more."""
        if self._open.get(ticket) != client_id:
            return False
        del self._open[ticket]
        return True

    def withdraw(self, ticket: str) -> None:
        """Drop a question: nobody waits for the answer any more."""
        client = self._clients.get(self._open.pop(ticket, ""))
        if client is not None:
            client.waiting = [question for question in client.waiting if question.ticket != ticket]

    def leave(self, client_id: str) -> None:
        """Note that a client has ended."""
        self._clients.pop(client_id, None)
