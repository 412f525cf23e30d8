"""Every error raymq raises, in one tree.

    RaymqError
    ├── InvalidArgumentError            29    a call's argument breaks a rule of the API
    │   ├── IllegalNameError            29    topic or group name
    │   ├── OffsetOutOfRangeError       21    an offset outside [min, max] of its queue
    │   ├── RecordsDamagedError         29    records that another replica sent fail their checks
    │   └── FilterExpressionError       23    the text of a filter that does not compile
    ├── MessageIllegalError             13    the message breaks a rule of the format
    │   └── MessageRefusedError         13    a put hook of the store refuses the message
    ├── TopicNotExistError              17
    │   └── NoTopicMatchesError         17    no topic has a name that matches the pattern
    ├── TopicExistsError                18
    ├── GroupNotExistError              26
    ├── NoPermissionError               16
    │   ├── AccessDeniedError           16    the user's policies do not allow the request
    │   └── AuthenticationError         16    not signed by a known, enabled user
    │       └── SignedTooEarlyError     16    signed before the server started: sign it anew
    ├── QuotaExceededError               2    retryable: the user sends or fetches more than its quota
    ├── UserNotExistError             3001
    ├── PolicyNotExistError           3002
    ├── SystemBusyError                  2    retryable: a bounded buffer is full
    │   └── TopicFullError               2    retryable: a bounded topic is full
    ├── ServiceNotAvailableError        14    retryable: the server exists but cannot serve now
    │   ├── NotMasterError              14    retryable: another replica is master now
    │   ├── InSyncReplicasError          1    retryable: too few replicas have everything
    │   └── NoListenerError             14    retryable: no listener waits for requests that are not stored
    ├── RequestTimeoutError          10006    retryable: no answer in time; the outcome is unknown
    ├── RequesterGoneError               1    a reply was stored, and nobody waits for it
    ├── CreateReplyMessageError      10007    the message to reply to is no request
    ├── RecallError                    604    a delayed message that cannot be recalled (any more)
    ├── SendUnknownError             10006    a send whose outcome is unknown after all its retries
    ├── ClusterNotFoundError         10004    no raymq runs where the client looked
    ├── ClientStateError             10000    closed, not subscribed, already started …
    │   └── SubscriptionConflictError 10000   another expression than the other members of the group have
    ├── TransactionError                 1    a transaction cannot be ended as asked
    │   └── TransactionTooLateError    604    only a check may end it now
    ├── ReceiptExpiredError            208    a received message was acknowledged, or handed out again
    ├── ListenerError                10000    the user's listener raised, or cannot be shipped
    ├── PredicateFailedError         10000    a user's predicate raised, hung or ended its process
    ├── ConfigError                     29    `raymq.yaml` or a setting
    │   └── MissingExtraError           29    the packages of an extra are not installed
    ├── StoreError                       1    the store on disk
    │   ├── StoreLockedError             1    another process holds the directory
    │   ├── StoreNotWritableError       14
    │   │   └── StoreFailedError        14    the disk failed in the middle; the outcome is unknown
    │   └── StoreCorruptError            1    damage that recovery must not repair by guessing
    ├── BodyUnreadableError              1    a message that is damaged, or whose body cannot be decompressed
    └── DataLossError                   21    records between two offsets are gone

The number is RocketMQ's response code (spec/messaging.md §10). `retryable` says whether the same call may succeed
later without a change by the caller. Fields are passed to `Exception.__init__` by position, so that every error
survives pickling, which Ray does to each error that crosses processes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar, Final

SHOWN_CHARS_MAX: Final = 200
"""Maximum number of characters that an error text shows of a refused name or filter."""


def shortened(text: str, around: int = 0) -> str:
    """Return at most SHOWN_CHARS_MAX characters of `text`, with the character at index `around` among them. Removed
    text is replaced by "…"."""
    first = max(0, min(around - SHOWN_CHARS_MAX // 2, len(text) - SHOWN_CHARS_MAX))
    last = first + SHOWN_CHARS_MAX
    return f"{'…' if first else ''}{text[first:last]}{'…' if last < len(text) else ''}"


def not_found(fact: str, nearest: Iterable[str], advice: str) -> str:
    """Return the text of an error about an unknown name. It has three parts: the fact, existing names that the user may
    have meant, and what else to do."""
    names = " or ".join(map(repr, nearest))
    return f"{fact}; did you mean {names}? Otherwise {advice}" if names else f"{fact}; {advice}"


def check_option_names(owner: str, options: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise TypeError if an object such as "a producer" (`owner`) has no option of a given name. The error names the
    unknown options and similar options, or all options."""
    known = sorted(allowed)
    if unknown := [name for name in options if name not in known]:
        nearest = [name for one in unknown for name in get_close_matches(one, known, n=2, cutoff=0.5)]
        raise TypeError(
            not_found(
                f"{owner} has no option {' and no option '.join(map(repr, unknown))}",
                dict.fromkeys(nearest),
                f"choose from its options: {', '.join(known)}",
            )
        )


class RaymqError(Exception):
    """The base class of all errors of raymq.

    `code`: RocketMQ's response code. `retryable`: True if the same call may succeed later. `retry_after_s`: how many
    seconds to wait before a retry, if the server sent this number.
    """

    code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False
    retry_after_s: float | None = None


def _named(queue: str) -> str:
    """Return the text that names a queue in an error: the word "queue" and the queue's name. A text with spaces is
    returned unchanged, because it already describes the queue."""
    return queue if " " in str(queue) else f"queue {queue}"


class InvalidArgumentError(RaymqError, ValueError):
    """An argument of a call breaks a rule of the API."""

    code = 29


class IllegalNameError(InvalidArgumentError):
    """A topic or group name breaks the naming rules (spec/messaging.md §2.5)."""

    def __init__(self, kind: str, name: str, rule: str) -> None:
        super().__init__(kind, name, rule)
        self.kind, self.name, self.rule = kind, name, rule

    def __str__(self) -> str:
        return f"{self.kind} name {shortened(self.name)!r} is not legal: {self.rule}"


class OffsetOutOfRangeError(InvalidArgumentError):
    """An offset is outside the range of offsets in its queue."""

    code = 21

    def __init__(self, queue: str, queue_offset: int, min_offset: int, max_offset: int) -> None:
        super().__init__(queue, queue_offset, min_offset, max_offset)
        self.queue, self.queue_offset = queue, queue_offset
        self.min_offset, self.max_offset = min_offset, max_offset

    def __str__(self) -> str:
        return (
            f"offset {self.queue_offset} is outside {_named(self.queue)}, which has offsets {self.min_offset} to "
            f"{self.max_offset} (the queue's end); seek to an offset in that range"
        )


class FilterExpressionError(InvalidArgumentError):
    """Error for a filter expression that does not compile. `position`: the position of the fault in `text`, in
    characters, counted from 1."""

    code = 23

    def __init__(self, text: str, position: int, reason: str) -> None:
        super().__init__(text, position, reason)
        self.text, self.position, self.reason = text, position, reason

    def __str__(self) -> str:
        text = shortened(self.text, self.position - 1)
        return f"the filter expression {text!r} does not compile: at character {self.position}, {self.reason}"


class MessageIllegalError(RaymqError, ValueError):
    """A message cannot be stored, because it breaks a rule of the format. Nothing was sent."""

    code = 13


class MessageRefusedError(MessageIllegalError):
    """A put hook of the store (store.put_hooks) refused a message. The message was not stored. `reason`: the hook's
    reason."""

    def __init__(self, hook: str, topic: str, reason: str) -> None:
        super().__init__(hook, topic, reason)
        self.hook, self.topic, self.reason = hook, topic, reason

    def __str__(self) -> str:
        return f"the store's hook {self.hook} refuses a message to topic {self.topic!r}: {self.reason}"


class TopicNotExistError(RaymqError):
    """The topic does not exist. `nearest`: names of existing topics that the caller may see and may have meant, the
    most similar first."""

    code = 17

    def __init__(self, topic: str, nearest: tuple[str, ...] = ()) -> None:
        super().__init__(topic, *((nearest,) if nearest else ()))
        self.topic, self.nearest = topic, nearest

    def __str__(self) -> str:
        if self.topic.startswith(("%RETRY%", "%DLQ%")):
            return f"topic {self.topic!r} does not exist: brokers create it with the first message that a group returns"
        create = f"create it: `raymq topic create {shlex.quote(self.topic)}`, or admin.create_topic"
        return not_found(f"topic {self.topic!r} does not exist", self.nearest, create)


class NoTopicMatchesError(TopicNotExistError):
    """No topic has a name that matches the pattern `topic`, a regular expression."""

    def __str__(self) -> str:
        return f"no topic's whole name matches the pattern {self.topic!r}; `raymq topic list` shows the names"


class TopicExistsError(RaymqError):
    """A topic of this name already exists."""

    code = 18

    def __init__(self, topic: str, detail: str) -> None:
        super().__init__(topic, detail)
        self.topic, self.detail = topic, detail

    def __str__(self) -> str:
        return f"topic {self.topic!r} exists already {self.detail}; delete the topic first, or use another name"


class GroupNotExistError(RaymqError):
    """The consumer group does not exist on the brokers. `nearest`: names of existing groups that the caller may see and
    may have meant, the most similar first."""

    code = 26

    def __init__(self, group: str, nearest: tuple[str, ...] = ()) -> None:
        super().__init__(group, *((nearest,) if nearest else ()))
        self.group, self.nearest = group, nearest

    def __str__(self) -> str:
        create = f"start a consumer of it, or create it: `raymq group create {shlex.quote(self.group)}`"
        return not_found(f"consumer group {self.group!r} does not exist", self.nearest, create)


class NoPermissionError(RaymqError):
    """The topic's permission or the group's settings forbid the call."""

    code = 16


class AccessDeniedError(NoPermissionError):
    """Access control is on, and the user's policies do not allow the request. Nothing was changed or read.

    `need`: the missing permission, such as ``Pub on Topic:orders``. `reason`: why the policies do not allow the
    request.
    """

    def __init__(self, user: str, need: str, reason: str) -> None:
        super().__init__(user, need, reason)
        self.user, self.need, self.reason = user, need, reason

    def __str__(self) -> str:
        return (
            f"user {self.user!r} may not do this: the call needs {self.need}, and {self.reason}; the file in "
            "access.users_file has the user's policies"
        )


class AuthenticationError(NoPermissionError):
    """Access control is on, and the request has no valid signature of an enabled user. Nothing was changed or read.

    A client gets its credentials from ``raymq.connect(credentials=…)``, from the environment variables RAYMQ_USER with
    RAYMQ_SECRET or RAYMQ_SECRET_FILE, or from a file.
    """


class SignedTooEarlyError(AuthenticationError):
    """A request was not signed for the server's current process, or its time is too far from the server's clock.
    Nothing was executed.

    If the request were accepted, the server could not detect a replay. raymq's clients read the server's incarnation id
    and clock from this error, sign the request for both, and send the request once more.

    `actor`: the server's name. `life`: the id of the server's process incarnation. `now_ms`: the server's clock, in ms.
    """

    def __init__(self, text: str, actor: str = "", life: bytes = b"", now_ms: int = 0) -> None:
        super().__init__(text, actor, life, now_ms)
        self.text, self.actor, self.life, self.now_ms = text, actor, life, now_ms

    def __str__(self) -> str:
        return str(self.text)


class UserNotExistError(RaymqError):
    """No user of this name exists. `nearest`: names of existing users that the caller may have meant, the most similar
    first."""

    code = 3001

    def __init__(self, user: str, nearest: tuple[str, ...] = ()) -> None:
        super().__init__(user, *((nearest,) if nearest else ()))
        self.user, self.nearest = user, nearest

    def __str__(self) -> str:
        create = f"create the user: `raymq user create {shlex.quote(self.user)}`, or admin.create_user"
        return not_found(f"user {self.user!r} does not exist", self.nearest, create)


class PolicyNotExistError(RaymqError):
    """The user has no policy, or no policy entry for the resource."""

    code = 3002

    def __init__(self, user: str, resource: str) -> None:
        super().__init__(user, resource)
        self.user, self.resource = user, resource

    def __str__(self) -> str:
        about = f"entry for {self.resource}" if self.resource else "policy"
        return f"user {self.user!r} has no {about}: see the file in access.users_file"


class QuotaExceededError(RaymqError):
    """The user sends or fetches more than its quota allows. The request changed nothing and may be repeated.

    `what`: ``bytes``, ``messages``, ``consumed bytes`` or ``consumed messages``. `retry_after_ms`: the time in ms after
    which the same request is within the quota.
    """

    code = 2
    retryable = True

    def __init__(self, user: str, what: str, retry_after_ms: int) -> None:
        super().__init__(user, what, retry_after_ms)
        self.user, self.what, self.retry_after_ms = user, what, retry_after_ms
        self.retry_after_s = retry_after_ms / 1000

    def __str__(self) -> str:
        return (
            f"user {self.user!r} has used up its quota of {self.what} per second: retry the request in "
            f"{self.retry_after_ms} ms; the file in access.users_file has the user's quotas"
        )


class SystemBusyError(RaymqError):
    """A bounded buffer or table of the server is full. The call changed nothing; the same call may succeed later.

    `retry_after_s`: the time in seconds after which the call may succeed; None if the server cannot estimate it.
    """

    code = 2
    retryable = True

    def __init__(self, text: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(*((text,) if retry_after_s is None else (text, retry_after_s)))
        self.text, self.retry_after_s = text, retry_after_s

    def __str__(self) -> str:
        return str(self.text)


class TopicFullError(SystemBusyError):
    """A bounded topic has reached the limit of its backlog. Nothing was stored.

    `topic`: the topic. `group`: the consumer group with the largest backlog; empty if all stored messages count.
    `limit`: the limit in this broker group, as text. `waits`: True if a producer waits for room (policy block).
    `most`: the number of messages that a producer should send at once, so that they fit soon. `retry_after_s`: the time
    in seconds after which a producer should try again. `waited_s`: how long the producer has waited; 0 if it has not.
    """

    def __init__(
        self,
        topic: str,
        group: str,
        limit: str,
        waits: bool,
        most: int,
        retry_after_s: float | None = None,
        waited_s: float = 0.0,
    ) -> None:
        RaymqError.__init__(self, topic, group, limit, waits, most, retry_after_s, waited_s)
        self.topic, self.group, self.limit, self.waits, self.most = topic, group, limit, waits, most
        self.retry_after_s, self.waited_s = retry_after_s, waited_s

    def __str__(self) -> str:
        cause = f"group {self.group!r} has not consumed" if self.group else "the topic stores"
        waited = f" for {self.waited_s:g} s" if self.waited_s else ""
        return (
            f"topic {self.topic!r} is full{waited}: {cause} {self.limit}, which is the limit; nothing was stored. "
            f"Start more consumers, or raise the limit: `raymq topic update {shlex.quote(self.topic)} --max-backlog …`"
        )


class ReceiptExpiredError(RaymqError):
    """The receipt of a received message is no longer valid: the message was acknowledged, or delivered again."""

    code = 208

    def __init__(self, topic: str, handle: str) -> None:
        super().__init__(topic, handle)
        self.topic, self.handle = topic, handle

    def __str__(self) -> str:
        return (
            f"the receipt {self.handle!r} of topic {self.topic!r} has expired: its message was acknowledged or "
            "delivered again; to have more time for a message, receive with a longer invisible_s"
        )


class ServiceNotAvailableError(RaymqError):
    """The server exists but cannot serve requests now."""

    code = 14
    retryable = True


class NotMasterError(ServiceNotAvailableError):
    """The store is not the master of its broker group in the epoch that the caller named. Nothing was written."""

    def __init__(self, broker_name: str, epoch: int) -> None:
        super().__init__(broker_name, epoch)
        self.broker_name, self.epoch = broker_name, epoch

    def __str__(self) -> str:
        return (
            f"the replica is not the master of broker group {self.broker_name!r} in epoch {self.epoch}; refresh "
            "the route, then send again"
        )


class InSyncReplicasError(ServiceNotAvailableError):
    """Too few replicas are in sync, so nothing was written. RocketMQ's name: IN_SYNC_REPLICAS_NOT_ENOUGH."""

    code = 1

    def __init__(self, broker_name: str, in_sync: int, wanted: int) -> None:
        super().__init__(broker_name, in_sync, wanted)
        self.broker_name, self.in_sync, self.wanted = broker_name, in_sync, wanted

    def __str__(self) -> str:
        return (
            f"broker group {self.broker_name!r} has {self.in_sync} replica(s) in sync, fewer than "
            f"min_in_sync_replicas ({self.wanted}), so nothing was stored; `raymq status` shows the missing "
            "replicas"
        )


class NoListenerError(ServiceNotAvailableError):
    """No listener waits for requests of a topic that are not stored (``durable=False``). The request was not
    executed."""

    def __init__(self, topic: str, tag: str = "") -> None:
        super().__init__(topic, tag)
        self.topic, self.tag = topic, tag

    def __str__(self) -> str:
        tag = f" with tag {self.tag!r}" if self.tag else ""
        return (
            f"no listener waits for requests with durable=False of topic {self.topic!r}{tag}, so the request was not "
            "executed: start a push consumer with request_threads=1 or more, or send a durable request"
        )


class RequestTimeoutError(RaymqError, TimeoutError):
    """The server did not answer within the caller's time limit. The request may still have been executed."""

    code = 10006
    retryable = True

    def __init__(self, what: str, timeout_s: float) -> None:
        super().__init__(what, timeout_s)
        self.what, self.timeout_s = what, timeout_s

    def __str__(self) -> str:
        return f"{self.what} did not complete within {self.timeout_s:g} s; see `raymq status`"


class RequesterGoneError(RaymqError):
    """The reply to a request was stored, but the client that sent the request is no longer connected. So nobody will
    read the reply."""

    def __init__(self, client_id: str, correlation_id: str) -> None:
        super().__init__(client_id, correlation_id)
        self.client_id, self.correlation_id = client_id, correlation_id

    def __str__(self) -> str:
        return (
            f"the reply to request {self.correlation_id} is stored, but client {self.client_id}, which sent the "
            "request, is no longer connected"
        )


class RecallError(RaymqError):
    """A delayed message cannot be recalled: the handle is invalid or names another topic, or the message is already
    due."""

    code = 604


class CreateReplyMessageError(RaymqError):
    """A message is not a request (it was not sent with `request`), so no reply to the message can be made."""

    code = 10007


class SendUnknownError(RaymqError):
    """A send was neither acknowledged nor refused. The messages may or may not be stored.

    `timeout_s`: the duration of the send in seconds. `is_over`: True if the send's time limit passed; False if the
    failure `last` ended the send earlier.
    """

    code = 10006

    def __init__(self, queue: str, count: int, timeout_s: float, last: str, is_over: bool = True) -> None:
        super().__init__(queue, count, timeout_s, last, is_over)
        self.queue, self.count, self.timeout_s, self.last, self.is_over = queue, count, timeout_s, last, is_over

    def __str__(self) -> str:
        within = f" within {self.timeout_s:.3g} s" if self.timeout_s else ""
        advice = "see `raymq status`" + (", or raise send_timeout_s" if self.is_over else "")
        return (
            f"{self.count} message(s) to {_named(self.queue)} were not acknowledged{within} and may or may not be "
            f"stored (last failure: {self.last}); {advice}"
        )


class ClusterNotFoundError(RaymqError):
    """The client found no raymq cluster."""

    code = 10004


class ClientStateError(RaymqError):
    """The object's state does not allow the call: for example, the object is closed, not subscribed or already
    started."""

    code = 10000


class TransactionError(RaymqError):
    """A transaction cannot be ended as requested: the transaction is unknown, belongs to another group, or already has
    another outcome."""

    code = 1


class TransactionTooLateError(TransactionError):
    """The immunity time of a transaction is over, so only the producer's answer to a check may end the
    transaction."""

    code = 604


class SubscriptionConflictError(ClientStateError):
    """A member of a consumer group subscribes to a topic with another filter expression than the group's earlier
    members. Nothing was changed.

    `expression`: the member's expression. `other_expression`: the expression of `other_member`. Both expressions are in
    the form that administrators see.
    """

    def __init__(self, group: str, topic: str, expression: str, other_member: str, other_expression: str) -> None:
        super().__init__(group, topic, expression, other_member, other_expression)
        self.group, self.topic, self.expression = group, topic, expression
        self.other_member, self.other_expression = other_member, other_expression

    def __str__(self) -> str:
        return (
            f"group {self.group!r} already subscribes to topic {self.topic!r} with {self.other_expression!r} "
            f"(member {self.other_member}), not with {self.expression!r}: all members of a group must use the "
            f"same expression for a topic. Subscribe with {self.other_expression!r}, stop the other members "
            "first, or use another group"
        )


class ListenerError(RaymqError):
    """A listener cannot be sent to its actor, or the listener raised an exception in the actor."""

    code = 10000


class PredicateFailedError(RaymqError):
    """A predicate returned no decision about a message: the predicate raised an exception, timed out, or ended its
    process.

    The consumer gets no later message of the queue until the predicate decides, or until the consumer seeks past the
    message.
    """

    code = 10000

    def __init__(self, predicate: str, queue: str, queue_offset: int, reason: str) -> None:
        super().__init__(predicate, queue, queue_offset, reason)
        self.predicate, self.queue, self.queue_offset, self.reason = predicate, queue, queue_offset, reason

    def __str__(self) -> str:
        return (
            f"{self.predicate} failed on the message at offset {self.queue_offset} of {_named(self.queue)}: "
            f'{self.reason}; correct the predicate and subscribe again, or set on_error="skip" or "match", or '
            "seek past the message"
        )


class ConfigError(RaymqError, ValueError):
    """`raymq.yaml`, or a setting, is not valid."""

    code = 29


class MissingExtraError(ConfigError, ImportError):
    """A function needs packages that only an extra of raymq installs, such as ``pip install 'raymq[spark]'``."""


class StoreError(RaymqError):
    """The base class of errors of the store on disk."""


class StoreLockedError(StoreError):
    """Another process holds the store directory."""

    def __init__(self, path: str, holder: str) -> None:
        super().__init__(path, holder)
        self.path, self.holder = path, holder

    def __str__(self) -> str:
        return (
            f"store directory {self.path} is in use by {self.holder}; stop raymq (`raymq down`), or use "
            "another directory"
        )


class StoreNotWritableError(StoreError):
    """The store does not accept appends, either temporarily or permanently."""

    code = 14


class StoreFailedError(StoreNotWritableError):
    """The disk failed during an append. Parts of the append may be stored. The store accepts no further
    appends."""


class StoreCorruptError(StoreError):
    """The store is damaged in a way that recovery must not repair by guessing."""


class RecordsDamagedError(InvalidArgumentError):
    """Records that another replica sent fail their checks, so nothing was written.

    `physical_offset`: where the first damaged record should be in the log. `size`: number of bytes from there to the
    end of the bytes that were sent.
    """

    def __init__(self, physical_offset: int, size: int) -> None:
        super().__init__(physical_offset, size)
        self.physical_offset, self.size = physical_offset, size

    def __str__(self) -> str:
        return (
            f"the {self.size} bytes for physical offset {self.physical_offset} do not begin with an intact record, so "
            "nothing was written"
        )


class BodyUnreadableError(RaymqError):
    """A message cannot be read: its bytes are damaged, or its body does not decompress.

    `queue` names the queue ("orders@broker-a:0"). `queue_offset` and `physical_offset` are -1 if unknown. `reason`
    describes the damage. `record_damaged` True: the record itself is damaged, so only the message's queue and offsets
    are known. False: only the body is unreadable, and all other fields are as stored.
    """

    def __init__(
        self, queue: str, queue_offset: int, physical_offset: int, reason: str, record_damaged: bool = False
    ) -> None:
        super().__init__(queue, queue_offset, physical_offset, reason, record_damaged)
        self.queue, self.queue_offset, self.physical_offset = queue, queue_offset, physical_offset
        self.reason, self.record_damaged = reason, record_damaged

    def __str__(self) -> str:
        what = "message" if self.record_damaged else "body of the message"
        at = (
            f"offset {self.queue_offset} of {_named(self.queue)}"
            if self.queue_offset >= 0
            else f"an unknown offset of {_named(self.queue)}"
        )
        place = f" (physical offset {self.physical_offset})" if self.physical_offset >= 0 else ""
        return (
            f"the {what} at {at}{place} cannot be read: {self.reason}; skip this message: the other messages are intact"
        )

    def __eq__(self, other: object) -> bool:
        return self.args == other.args if isinstance(other, BodyUnreadableError) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.args)


class DataLossError(RaymqError):
    """Records that a reader expects no longer exist, because retention deleted the records or their queue was
    deleted."""

    code = 21
