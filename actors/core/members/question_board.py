"""The queries (Question) at a broker that wait for a client, and the clients that poll for queries.

A broker cannot call a client program, so a client polls for queries. A query is dropped if its sender withdraws it.
Memory is bounded: few queries wait for a client that does not poll, and clients that stop polling are removed. The
methods get the current time as an argument. No query survives the broker: its sender retries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from raymq.common.errors import SystemBusyError
from raymq.common.members.questions import QUESTION_WAIT_S, Question

LISTENS_S: Final = QUESTION_WAIT_S + 10.0
"""Time, in seconds, after a client's last poll for queries. During this time the broker still stores queries for the
client."""
QUESTIONS_WAITING_MAX: Final = 8
"""Maximum number of administrators' queries that wait for one client."""


@dataclass(slots=True)
class _Client:
    asked_s: float
    waiting: list[Question] = field(default_factory=list)


class QuestionBoard:
    """The queries that wait for clients at one broker. Not thread-safe."""

    def __init__(self) -> None:
        # The polling clients, by id, in the order of their last polls: clients that stopped polling come first.
        self._clients: dict[str, _Client] = {}
        self._open: dict[str, str] = {}
        """For each query that has no answer yet, by the query's ticket: the id of the client that must answer."""

    def take(self, client_id: str, now_s: float) -> list[Question]:
        """Return the queries (Question) that wait for a client, and record the time of the client's poll."""
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
        """Queue a query (Question) for a client. Returns False if the client does not poll this broker. Raises
        SystemBusyError if too many queries wait for the client."""
        client = self._clients.get(client_id)
        if client is None or now_s - client.asked_s >= LISTENS_S:
            return False
        if len(client.waiting) >= QUESTIONS_WAITING_MAX:
            raise SystemBusyError(f"{len(client.waiting)} queries already wait for client {client_id}; try again later")
        client.waiting.append(question)
        self._open[question.ticket] = client_id
        return True

    def answered(self, client_id: str, ticket: str) -> bool:
        """Close a query (Question) that a client has answered. Returns True if the query was open and addressed to this
        client."""
        if self._open.get(ticket) != client_id:
            return False
        del self._open[ticket]
        return True

    def withdraw(self, ticket: str) -> None:
        """Drop a query (Question) whose sender no longer waits for the answer."""
        client = self._clients.get(self._open.pop(ticket, ""))
        if client is not None:
            client.waiting = [question for question in client.waiting if question.ticket != ticket]

    def leave(self, client_id: str) -> None:
        """Remove a client that has shut down."""
        self._clients.pop(client_id, None)
