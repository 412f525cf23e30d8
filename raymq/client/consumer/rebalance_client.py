"""RebalanceClient sends the heartbeats of all members in a program to the Rebalance actors, and passes the answers to
the members.

    membership = client.join(group, source)   the client requests a heartbeat from `source` about once a second
    membership.beat_soon()                    something has changed that others wait for
    membership.leave(farewell)                the member leaves its group

One call, at the same time of each second, carries the heartbeats of all members whose groups are at one Rebalance
actor. One thread per actor makes these calls. So a program with many consumers costs the servers little more than a
program with one consumer. An actor that hangs delays only its own groups.

The group's name determines the group's slot (a share of all groups) and its home actor. If the home actor does not
answer within REBALANCE_CALL_TIMEOUT_S, the client calls the next actor in the ring. That actor names the actor that
holds the slot, or finally takes the slot over (actors.core.rebalance.slot_lease). A member ignores an assignment if it
has already received a newer one.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

from raymq.common.errors import RaymqError, ServiceNotAvailableError, SubscriptionConflictError
from raymq.common.names import REBALANCE_SLOTS, RebalanceName
from raymq.common.parallel import require_daemon, start_daemon
from raymq.common.protocol.membership import (
    MEMBER_HEARTBEAT_INTERVAL_S,
    GroupAssignment,
    GroupFailure,
    GroupHeartbeat,
    GroupRefusal,
    Heartbeat,
    HeartbeatAnswer,
    OtherServer,
    SteadyAnswer,
    SteadyHeartbeat,
    slot_of,
)
from raymq.common.retry import persist_until
from raymq.remoting.actor_ref import ActorGoneError, ActorRef
from raymq.remoting.route_cache import RouteCache

REBALANCE_CALL_TIMEOUT_S: Final = 3.0
REBALANCE_FIRST_TIMEOUT_S: Final = 10.0
"""Timeout in s of the first call to a Rebalance actor, because the actor may just have been started."""
START_REBALANCE_TIMEOUT_S: Final = 10.0
LEAVE_TIMEOUT_S: Final = 3.0
RESET_TIMEOUT_S: Final = 20.0
AGAIN_S: Final = 0.25
"""Pause in s before the client resends a heartbeat that no Rebalance actor has accepted."""
SOON_S: Final = 0.05
"""First pause in s before the next heartbeat, if the group's answer was incomplete. The pause doubles with each further
incomplete answer."""
TURNS_MAX: Final = 3
"""Maximum number of consecutive times that a heartbeat is sent again without a pause. A heartbeat is sent again with a
new session, or to another actor."""
CHECK_TIMEOUT_S: Final = 1.0
"""Timeout in s of the check that the members of a group have the same subscription. A consumer makes this check before
it joins its group."""
SILENCE_S: Final = 5.0
"""Time in s without an answer from a Rebalance actor after which a group member gets an error."""
IDLE_LINK_S: Final = 10.0
NO_ACTORS: Final[Mapping[str, ActorRef]] = {}
"""The value of an argument for known actors if the caller knows none."""

logger = logging.getLogger(__name__)


class HeartbeatSource(Protocol):
    """Interface of one member that sends heartbeats. The client's threads call its methods one at a time; the methods
    must not block."""

    def next_heartbeat(self) -> GroupHeartbeat | None:
        """Return the heartbeat to send now, or None to send no heartbeat this time. RebalanceClient sets its session,
        sequence and generation."""

    def assigned(self, assignment: GroupAssignment, sent_s: float) -> None:
        """Apply the group's answer to this member's heartbeat. `sent_s`: a time just before the heartbeat was
        created."""

    def unanswered(self, error: RaymqError) -> None:
        """Called if the group does not answer the member's heartbeat. The current assignment stays valid until the
        session times out."""

    def refused(self, error: SubscriptionConflictError) -> None:
        """Called if the group does not accept the member, because other members have another subscription."""


class ServerChoice:
    """Chooses the Rebalance actor that receives a group's heartbeats. The actors' answers determine the choice."""

    def __init__(self, group: str) -> None:
        self._slot = slot_of(group)
        self._name: str | None = None

    def server(self, names: Sequence[str]) -> str | None:
        """Return the Rebalance actor to which the next heartbeat goes. `names`: the running actors. Returns None if no
        actor is known."""
        if names and self._name is None:
            self._name = names[self._slot % len(names)]
        return self._name

    def redirected(self, holder: str) -> None:
        """From now on, call the Rebalance actor `holder`. Another Rebalance actor has answered that `holder` manages
        the group."""
        self._name = holder

    def failed(self, names: Sequence[str]) -> None:
        """Use the next Rebalance actor in the ring, because the current actor did not answer."""
        known = self._name in names
        self._name = names[(names.index(self._name) + 1) % len(names)] if known and self._name else None


class HeartbeatElision:
    """Sends short heartbeats while neither the member's state nor its assignment changes."""

    def __init__(self) -> None:
        self._said: GroupHeartbeat | None = None
        self._heard: GroupAssignment | None = None

    def allows(self, heartbeat: GroupHeartbeat) -> bool:
        """True if the member may send a short heartbeat: the group has already received a full heartbeat with the same
        content as `heartbeat`. Session, sequence and generation are not compared."""
        return self._heard is not None and heartbeat == self._said

    @property
    def assignment(self) -> GroupAssignment | None:
        """The group's last full answer, to which short heartbeats may refer; None if the next heartbeat must be
        full."""
        return self._heard

    def heard(self, heartbeat: GroupHeartbeat, answer: GroupAssignment) -> None:
        """Record `answer`, the group's answer to the member's `heartbeat`. The fields session, sequence and generation
        of `heartbeat` are not set."""
        settled = answer.queues == heartbeat.holding and not answer.incomplete and not heartbeat.leaving
        self._said, self._heard = (heartbeat, answer) if settled else (None, None)

    def forget(self) -> None:
        """Make the next heartbeat a full heartbeat, because the group may have lost or never received the last
        one."""
        self._said = self._heard = None


class Membership:
    """One member of a group, created by `RebalanceClient.join`."""

    def __init__(self, client: RebalanceClient, group: str, source: HeartbeatSource) -> None:
        self.group = group
        self.source = source
        self.choice = ServerChoice(group)
        self.due_s = 0.0
        """Time at which the member's next heartbeat is sent. The client's lock guards this field and `wanted`."""
        self.wanted = False
        """True if this member must send another heartbeat as soon as the heartbeat in flight has been answered."""
        self.farewell: GroupHeartbeat | None = None
        self.gone = threading.Event()
        self._client = client
        self._session = self._sequence = self._generation = 0
        self._steadiness = HeartbeatElision()
        self._saying: GroupHeartbeat | None = None
        """The last full heartbeat that this member has sent, as it was before session, sequence and generation were
        set. None before the first full heartbeat."""
        self._turns = 0
        self._pause_s = SOON_S
        self._silent_since_s = time.monotonic()

    def beat_soon(self) -> None:
        """Send a heartbeat at once, because other members wait for a change of this member."""
        self._client.wake(self)

    def leave(self, farewell: GroupHeartbeat, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Send the member's last heartbeat, which announces that the member leaves. Returns when the group has
        answered. If the group does not answer within `timeout_s`, it keeps the member until the member's session
        expires."""
        self.farewell = farewell
        self._client.wake(self)
        if not self.gone.wait(timeout_s):
            logger.info(
                "group %s: a member left, but the group did not answer; the member's session will expire", self.group
            )
        self._client.forget(self)

    def numbered(self) -> Heartbeat | None:
        """Return the member's next heartbeat, with the member's session, the next sequence number and the latest
        generation of the group. The heartbeat is short if its content has not changed since the previous heartbeat.
        Returns None if the member sends no heartbeat now."""
        heartbeat = self.farewell or self.source.next_heartbeat()
        if heartbeat is None:
            return None
        self._sequence += 1
        if self._steadiness.allows(heartbeat):
            return SteadyHeartbeat(heartbeat.member, self._session, self._sequence, self._generation)
        self._saying = heartbeat
        return replace(heartbeat, session=self._session, sequence=self._sequence, generation=self._generation)

    def answered(self, heartbeat: Heartbeat, answer: HeartbeatAnswer, sent_s: float) -> float | None:
        """Apply the group's answer to a heartbeat. Returns the pause in s until the next heartbeat; None for the usual
        interval."""
        if isinstance(answer, SteadyAnswer):
            return self._answered_in_short(answer, sent_s)
        self._steadiness.forget()
        if isinstance(answer, OtherServer):
            if answer.holder:
                self.choice.redirected(answer.holder)
            self._silent(ServiceNotAvailableError(f"no Rebalance actor serves group {self.group!r} now; retry later"))
            return self._again()
        if isinstance(answer, GroupFailure):
            self._silent(
                ServiceNotAvailableError(f"the Rebalance actor cannot serve group {self.group!r}: {answer.error}")
            )
            return None
        if isinstance(answer, GroupRefusal):
            self.source.refused(SubscriptionConflictError(self.group, *answer))
            return None
        leaving = isinstance(heartbeat, GroupHeartbeat) and heartbeat.leaving
        if answer.session != heartbeat.session and not leaving:
            self._session = answer.session
            self._generation = max(self._generation, answer.generation)
            return self._again()
        self._turns = 0
        if leaving:
            if self.farewell is not None:
                self.gone.set()
            return None
        if answer.generation < self._generation:
            # Ignore an answer whose generation is older than the known generation: another Rebalance actor has taken
            # over the group since.
            return None
        self._generation, self._silent_since_s = answer.generation, time.monotonic()
        self.source.assigned(answer, sent_s)
        if self._saying is not None and isinstance(heartbeat, GroupHeartbeat):
            self._steadiness.heard(self._saying, answer)
        self._pause_s = min(2 * self._pause_s, MEMBER_HEARTBEAT_INTERVAL_S) if answer.incomplete else SOON_S
        return self._pause_s if answer.incomplete else None

    def _answered_in_short(self, answer: SteadyAnswer, sent_s: float) -> float | None:
        known = self._steadiness.assignment
        if answer is SteadyAnswer.TELL or known is None:
            self._steadiness.forget()
            return self._again()
        self._turns, self._silent_since_s = 0, time.monotonic()
        self.source.assigned(known, sent_s)
        return None

    def failed(self, error: RaymqError, names: Sequence[str]) -> float:
        """Record that a heartbeat call failed. Returns the pause in s until the next call."""
        self._steadiness.forget()
        self.choice.failed(names)
        self._silent(error)
        return AGAIN_S

    def _again(self) -> float:
        self._turns += 1
        return 0.0 if self._turns % TURNS_MAX else AGAIN_S

    def _silent(self, error: RaymqError) -> None:
        if time.monotonic() - self._silent_since_s > SILENCE_S:
            self.source.unanswered(error)


class RebalanceClient:
    """Sends the heartbeats of all members in one program. Thread-safe."""

    def __init__(self, routes: RouteCache) -> None:
        self._directory = RebalanceDirectory(routes)
        self._actors: dict[str, ActorRef] = {}
        """References to the Rebalance actors, by name, for the checks of subscriptions."""
        self._lock = threading.Lock()
        """Lock that guards the attributes below it in the constructor, and the members' `due_s` and `wanted`."""
        self._members: dict[Membership, _Link] = {}
        self._links: dict[str | None, _Link] = {}
        self._phase_s = random.random() * MEMBER_HEARTBEAT_INTERVAL_S
        self._closed = False

    def join(self, group: str, source: HeartbeatSource) -> Membership:
        """Join a group: start to send the member's heartbeats. Raises ClientStateError at the interpreter's exit, when
        Python 3.12 starts no thread, if no thread of another member can send the heartbeats. The member has then not
        joined."""
        membership = Membership(self, group, source)
        with self._lock:
            self._place(membership)
        return membership

    def check(self, group: str, member: str, expressions: Mapping[str, str]) -> None:
        """Check that the member's subscriptions agree with the other members' subscriptions (see the function
        `check_expressions`). Makes one call if the names of the Rebalance actors are known."""
        known = {name: self._actors.setdefault(name, ActorRef(name)) for name in self._directory.names}
        check_expressions(group, member, expressions, known=known)

    def wake(self, membership: Membership) -> None:
        """Send the member's next heartbeat at once (see Membership.beat_soon)."""
        with self._lock:
            link = self._members.get(membership)
            if link is not None:
                membership.due_s, membership.wanted = 0.0, True
                link.changed.notify()

    def forget(self, membership: Membership) -> None:
        """Stop sending heartbeats of a member."""
        with self._lock:
            link = self._members.pop(membership, None)
            if link is not None:
                link.members.discard(membership)

    def close(self) -> None:
        """Stop sending heartbeats of all members, and stop the threads."""
        with self._lock:
            self._closed = True
            for link in self._links.values():
                link.changed.notify()

    def _place(self, membership: Membership) -> None:
        """Assign a member to the thread of its Rebalance actor. The caller holds the lock."""
        name = membership.choice.server(self._directory.names)
        link, before = self._links.get(name), self._members.get(membership)
        if link is None:
            link = _Link(name, self._lock)
            if not self._start(link, before, membership.group):
                membership.due_s = time.monotonic() + MEMBER_HEARTBEAT_INTERVAL_S
                return
            self._links[name] = link
        if before is not link:
            if before is not None:
                before.members.discard(membership)
            self._members[membership] = link
            link.members.add(membership)
        link.changed.notify()

    def _start(self, link: _Link, before: _Link | None, group: str) -> bool:
        """Start the thread of a link for a member of `group`. Returns False if the thread cannot be started now and the
        member has another thread (`before`), which keeps the member. Without such a thread, raises ClientStateError at
        the interpreter's exit, or RuntimeError."""
        name = f"heartbeats-{link.name or 'start'}"
        if before is None:
            require_daemon(self._run, link, name=name, what=f"a consumer of group {group!r}")
            return True
        try:
            return start_daemon(self._run, link, name=name) is not None
        except RuntimeError as error:
            logger.warning("cannot start the thread for Rebalance actor %s now: %s", link.name, error)
            return False

    def _run(self, link: _Link) -> None:
        while (due := self._next_due(link)) is not None:
            try:
                if link.actor is None:
                    self._find_servers(due)
                else:
                    self._send(link, link.actor, due)
            except Exception:  # catch bugs: if this thread ended, members would lose their queues for ever
                logger.exception("heartbeats to Rebalance actor %s failed, retrying", link.name)
                self._schedule([(membership, AGAIN_S) for membership in due])

    def _next_due(self, link: _Link) -> list[Membership] | None:
        """Wait until a heartbeat is due, and return all members whose heartbeats are due. Returns None if the thread is
        no longer needed."""
        with self._lock:
            while not self._closed:
                now_s = time.monotonic()
                due = [membership for membership in link.members if membership.due_s <= now_s]
                if due:
                    for membership in due:
                        membership.wanted = False
                    return due
                next_s = min((membership.due_s for membership in link.members), default=None)
                woken = link.changed.wait(IDLE_LINK_S if next_s is None else next_s - now_s)
                if next_s is None and not woken and not link.members:
                    break
            self._links.pop(link.name, None)
            return None

    def _send(self, link: _Link, actor: ActorRef, due: Iterable[Membership]) -> None:
        sent_s = time.monotonic()
        sent: list[tuple[Membership, Heartbeat]] = []
        pauses: list[tuple[Membership, float | None]] = []
        for membership in due:
            heartbeat = membership.numbered()
            if heartbeat is None:
                pauses.append((membership, None))
            else:
                sent.append((membership, heartbeat))
        try:
            answers = self._call(link, actor, sent)
        except RaymqError as error:
            logger.info("heartbeats to Rebalance actor %s failed: %s", link.name, error)
            self._directory.failed(error)
            names = self._directory.names
            pauses += [(membership, membership.failed(error, names)) for membership, _ in sent]
        else:
            for (membership, heartbeat), answer in zip(sent, answers, strict=True):
                try:
                    pauses.append((membership, membership.answered(heartbeat, answer, sent_s)))
                except Exception:  # catch a bug in one member, because it must not cost the other members their queues
                    logger.exception("a member of group %s cannot apply its assignment", membership.group)
                    pauses.append((membership, None))
        self._schedule(pauses)

    def _call(
        self, link: _Link, actor: ActorRef, sent: Sequence[tuple[Membership, Heartbeat]]
    ) -> list[HeartbeatAnswer]:
        if not sent:
            return []
        batch = [(membership.group, heartbeat) for membership, heartbeat in sent]
        timeout_s = REBALANCE_CALL_TIMEOUT_S if link.answered else REBALANCE_FIRST_TIMEOUT_S
        answers: list[HeartbeatAnswer] = actor.call("heartbeats", batch, timeout_s=timeout_s)
        link.answered = True
        return answers

    def _schedule(self, pauses: Iterable[tuple[Membership, float | None]]) -> None:
        """Set the times of the members' next heartbeats, and assign each member to the thread that sends its
        heartbeats."""
        interval_s, now_s = MEMBER_HEARTBEAT_INTERVAL_S, time.monotonic()
        # The heartbeats of all members are sent at the same moment of each second, whenever the members joined. So one
        # call carries all of them.
        usual_s = now_s + interval_s - (now_s + self._phase_s) % interval_s
        with self._lock:
            for membership, pause_s in pauses:
                if membership not in self._members:
                    continue
                if not membership.wanted:
                    membership.due_s = usual_s if pause_s is None else now_s + pause_s
                self._place(membership)

    def _find_servers(self, due: Iterable[Membership]) -> None:
        try:
            self._directory.find()
        except RaymqError as error:
            pauses = [(membership, membership.failed(error, ())) for membership in due]
            self._schedule([(membership, MEMBER_HEARTBEAT_INTERVAL_S) for membership, _ in pauses])
        else:
            self._schedule([(membership, 0.0) for membership in due])


class _Link:
    """One Rebalance actor, the thread that calls it, and the members whose heartbeats the actor receives. If the name
    is empty, the thread finds the running Rebalance actors instead."""

    def __init__(self, name: str | None, lock: threading.Lock) -> None:
        self.name = name
        self.actor = None if name is None else ActorRef(name)
        self.members: set[Membership] = set()
        self.changed = threading.Condition(lock)
        self.answered = False


class RebalanceDirectory:
    """The running Rebalance actors of the cluster. If no Rebalance actor runs, a broker starts them."""

    def __init__(self, routes: RouteCache) -> None:
        self._routes = routes
        self._brokers: list[str] = []
        self.names: tuple[str, ...] = ()
        """Names of the running Rebalance actors. Empty before `find` has found or started them, and after an actor has
        ended permanently."""

    def find(self) -> None:
        """Find the running Rebalance actors, or request a broker to start them. Raises RaymqError if no actor runs and
        no broker answers."""
        found = running_servers()
        self.names = found or self._start()

    def failed(self, error: RaymqError) -> None:
        """Record that a call to a Rebalance actor failed. If the actor has ended and will not restart, the actors must
        be found or started again."""
        if isinstance(error, ActorGoneError):
            self.names = ()

    def _start(self) -> tuple[str, ...]:
        failure: RaymqError = ServiceNotAvailableError("no broker is registered at the NameServer; see `raymq status`")
        for broker_name in self._broker_names():
            try:
                return tuple(ActorRef(broker_name).call("start_rebalance", timeout_s=START_REBALANCE_TIMEOUT_S))
            except RaymqError as error:
                failure = error
        raise failure

    def _broker_names(self) -> list[str]:
        """Return the names of the cluster's brokers. While no NameServer answers, returns the last known names."""
        try:
            self._brokers = sorted(self._routes.brokers())
        except RaymqError:
            if not self._brokers:
                raise
        return self._brokers


def running_servers() -> tuple[str, ...]:
    """Return the names of the Rebalance actors that run or are restarting."""
    names = (str(RebalanceName(index)) for index in range(REBALANCE_SLOTS))
    return tuple(name for name in names if _runs(ActorRef(name)))


def call_holder(
    group: str, method: str, timeout_s: float, *arguments: Any, known: Mapping[str, ActorRef] = NO_ACTORS
) -> Any:
    """Call a method of the Rebalance actor that holds a group. The method's first argument is the group; `arguments`
    are the other arguments. Returns None if no Rebalance actor runs. Safe to repeat.

    `known`: the Rebalance actors by name, if the caller knows them. They save the calls that find the actors. After a
    failed call, the actors are found again. Raises RequestTimeoutError or ServiceNotAvailableError if the actor does
    not answer.
    """
    choice = ServerChoice(group)

    def attempt(left_s: float) -> Any:
        nonlocal known
        actors, known = known, NO_ACTORS
        names = tuple(actors) or running_servers()
        for _ in range(TURNS_MAX):
            name = choice.server(names)
            if name is None:
                return None
            try:
                actor = actors.get(name) or ActorRef(name)
                answer = actor.call(method, group, *arguments, timeout_s=min(left_s, REBALANCE_CALL_TIMEOUT_S))
            except RaymqError:
                choice.failed(names)
                raise
            if not isinstance(answer, OtherServer):
                return answer
            if answer.holder and answer.holder != name:
                choice.redirected(answer.holder)
            else:
                break
        raise ServiceNotAvailableError(f"no Rebalance actor serves group {group!r} now; retry later")

    return persist_until(time.monotonic() + timeout_s, attempt)


def check_expressions(
    group: str,
    member: str,
    expressions: Mapping[str, str],
    timeout_s: float = CHECK_TIMEOUT_S,
    *,
    known: Mapping[str, ActorRef] = NO_ACTORS,
) -> None:
    """Raise SubscriptionConflictError if a group member other than `member` subscribes to one of these topics with
    another expression. `expressions`: expressions by topic, in the form for administrators. `known`: see `call_holder`.
    If no Rebalance actor answers in time, nothing is raised; later heartbeats report the conflict."""
    try:
        conflict = call_holder(group, "conflict", timeout_s, member, expressions, known=known)
    except RaymqError as error:
        logger.info("cannot compare the subscription with the other members of group %s: %s", group, error)
        return
    if conflict is not None:
        raise SubscriptionConflictError(group, *conflict)


def offsets_reset(group: str, timeout_s: float = RESET_TIMEOUT_S) -> None:
    """Notify a group's members, by their next heartbeats, that brokers have reset offsets of the group.

    Safe to repeat. Raises no error if the group has no members. Raises no error either if the Rebalance actor has just
    died. The next actor begins with a new offsets version, which makes every member ask the brokers about resets.
    Raises RequestTimeoutError or ServiceNotAvailableError if no actor answers for the group; its members then get the
    reset with their next commit.
    """
    call_holder(group, "offsets_reset", timeout_s)


def _runs(actor: ActorRef) -> bool:
    """True if the Rebalance actor runs or is restarting."""
    try:
        actor.handle()
    except ServiceNotAvailableError:
        return False
    return True
