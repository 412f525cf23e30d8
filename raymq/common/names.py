"""The rules for names of topics and groups, and the names of actors.

Topic and group rules are RocketMQ's (spec/messaging.md §2.5). An actor's name is an identity that prints and parses
itself, so no module spells one by hand: `storage-broker-a-0` is `StorageName("broker-a", 0)`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from raymq.common.errors import IllegalNameError, InvalidArgumentError

NAMESPACE: Final = "raymq"
"""The Ray namespace of every raymq actor."""

INSTANCES: Final = "raymq-instances"
"""The Ray namespace of the Listener actors of push consumers and of PredicateRunners: they run users' functions."""

CONTROLLER: Final = "controller"
"""The actor that decides who leads each broker group of several replicas."""

BROKER_GROUPS_MAX: Final = 26
"""The most broker groups: a letter names each, from broker-a to broker-z."""
USERS_BROKER: Final = "broker-a"
"""The first broker group, which keeps the changes of users and policies."""

CONSOLE: Final = "console"
"""The actor that serves the web console, where there is one."""

TOPIC_NAME_MAX: Final = 127
INTERNAL_TOPIC_NAME_MAX: Final = 255
GROUP_NAME_MAX: Final = 120
RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
LMQ_PREFIX: Final = "%LMQ%"
"""The prefix of light queues, into which a message is put beside its own queue (storage/dispatch/multi_dispatch.py)."""
SYSTEM_PREFIX: Final = "rmq_sys_"
STATE_TOPIC: Final = SYSTEM_PREFIX + "broker_state"
"""The records of a broker's state, in its own store (actors.broker.state_log)."""
REPLY_SUFFIX: Final = "_REPLY_TOPIC"
"""Ends the name of the topic of a cluster's replies to requests, which begins with the cluster's name."""
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
"""The messages of transactions that are not finished; queue 0 of it is their only queue."""
OP_HALF_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
"""Records that say which half messages are finished."""
CHECK_MAX_TIME_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
"""The half messages that were given up, because no check found out their outcome."""
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
"""The records of a trace (raymq.telemetry.trace), unless a client names another topic."""
AUTO_CREATE_TOPIC: Final = "TBW102"
"""A topic of brokers that create a topic when a message is sent to it; new topics get its permission."""

TRANSACTION_TOPICS: Final = frozenset((HALF_TOPIC, OP_HALF_TOPIC, CHECK_MAX_TIME_TOPIC))
"""The topics that only transactions write to."""

SYSTEM_TOPICS: Final = frozenset(
    """TBW102 SCHEDULE_TOPIC_XXXX BenchmarkTest RMQ_SYS_TRANS_HALF_TOPIC RMQ_SYS_TRACE_TOPIC
    RMQ_SYS_TRANS_OP_HALF_TOPIC TRANS_CHECK_MAX_TIME_TOPIC SELF_TEST_TOPIC OFFSET_MOVED_EVENT
    CHECKPOINT_TOPIC""".split()
)

SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"
SYSTEM_GROUPS: Final = frozenset(
    """TOOLS_CONSUMER FILTERSRV_CONSUMER SELF_TEST_C_GROUP CID_ONS-HTTP-PROXY CID_ONSAPI_PULL CID_ONSAPI_PERMISSION
    CID_ONSAPI_OWNER CID_RMQ_SYS_TRANS""".split()
)
"""RocketMQ's predefined groups (spec/messaging.md §2.7)."""

REBALANCE_SLOTS: Final = 4
"""The shares into which all consumer groups are divided, by name; also the most Rebalance actors of a cluster."""

NODE_ID_SHOWN: Final = 16
"""Hexadecimal digits of a Ray node's id that tell nodes apart; the whole id has 56."""

_LEGAL: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
_RULE: Final = "use letters, digits and the characters % | - _"


def is_system_topic(topic: str) -> bool:
    """True if `topic` belongs to the server: it may not be created, deleted or sent to by users."""
    return topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_PREFIX) or topic.endswith(REPLY_SUFFIX)


def is_internal_topic(topic: str) -> bool:
    """True if `topic` is made by the server for its own or a group's use, or is a light queue: no user has created it
    by name."""
    return is_system_topic(topic) or topic.startswith((RETRY_PREFIX, DLQ_PREFIX, LMQ_PREFIX))


def is_light_queue(topic: str) -> bool:
    """True if `topic` is that of a light queue (`light_queue`)."""
    return topic.startswith(LMQ_PREFIX)


def light_queue(name: str) -> str:
    """The topic under which the light queue `name` is consumed: ``consumer.subscribe(raymq.light_queue("alice"))``.

    It has one queue, 0, in each broker group, with the messages that name it in `Message.light_queues`.
    IllegalNameError.

    >>> light_queue("alice")
    '%LMQ%alice'
    """
    if not isinstance(name, str) or not name.strip():
        raise IllegalNameError("light queue", str(name), "it is blank")
    if name.startswith(LMQ_PREFIX):
        raise IllegalNameError("light queue", name, f"{LMQ_PREFIX} is put before it")
    return _check("light queue", LMQ_PREFIX + name, INTERNAL_TOPIC_NAME_MAX)


def is_system_group(group: str) -> bool:
    """True if `group` is one of the server's and its tools', which need not be made known."""
    return group in SYSTEM_GROUPS or group.startswith(SYSTEM_GROUP_PREFIX)


def retry_topic(group: str) -> str:
    """The topic that gives a group the messages again that it could not consume at first."""
    return RETRY_PREFIX + group


def dlq_topic(group: str) -> str:
    """The dead-letter topic, with the messages that a group could not consume in all its attempts."""
    return DLQ_PREFIX + group


def reply_topic(cluster: str) -> str:
    """The topic of the replies to requests of a cluster.

    >>> reply_topic("raymq")
    'raymq_REPLY_TOPIC'
    """
    return cluster + REPLY_SUFFIX


def check_topic(topic: str) -> str:
    """Return `topic` if it is a legal name, else raise IllegalNameError (spec/messaging.md §2.5)."""
    internal = isinstance(topic, str) and topic.startswith((RETRY_PREFIX, DLQ_PREFIX, LMQ_PREFIX))
    return _check("topic", topic, INTERNAL_TOPIC_NAME_MAX if internal else TOPIC_NAME_MAX)


def check_user_topic(topic: str) -> str:
    """`check_topic`, and refuse the topics that belong to the server."""
    check_topic(topic)
    if is_system_topic(topic):
        raise IllegalNameError("topic", topic, "it is a system topic")
    if is_light_queue(topic):
        raise IllegalNameError(
            "topic", topic, "it is a light queue: name it in the light_queues of messages to other topics"
        )
    return topic


def check_group(group: str) -> str:
    """Return `group` if it is a legal producer or consumer group name, else raise IllegalNameError."""
    return _check("group", group, GROUP_NAME_MAX)


def _check(kind: str, name: str, longest: int) -> str:
    if not isinstance(name, str) or not name.strip():
        raise IllegalNameError(kind, str(name), "it is blank")
    if not _LEGAL.fullmatch(name):
        raise IllegalNameError(kind, name, _RULE)
    if len(name) > longest:
        raise IllegalNameError(kind, name, f"it has {len(name)} characters, at most {longest} are allowed")
    return name


@dataclass(frozen=True, slots=True, order=True)
class NameServerName:
    """`nameserver-0`"""

    index: int

    def __str__(self) -> str:
        return f"nameserver-{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class StorageName:
    """`storage-broker-a-0`: replica 0 of broker group `broker-a`."""

    broker_name: str
    replica: int

    def __str__(self) -> str:
        return f"storage-{self.broker_name}-{self.replica}"

    @classmethod
    def parse(cls, text: str) -> StorageName:
        match = re.fullmatch(r"storage-(.+)-(\d+)", text)
        if match is None:
            raise IllegalNameError("storage actor", text, "expected storage-BROKER-REPLICA")
        return cls(match[1], int(match[2]))


@dataclass(frozen=True, slots=True, order=True)
class ReplicatorName:
    """`replicator-broker-a-1`: what copies the log to replica 1 of broker group `broker-a`."""

    broker_name: str
    replica: int

    def __str__(self) -> str:
        return f"replicator-{self.broker_name}-{self.replica}"


@dataclass(frozen=True, slots=True, order=True)
class RebalanceName:
    """`rebalance-0`: one of the actors that serve all consumer groups."""

    index: int

    def __str__(self) -> str:
        return f"rebalance-{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class PullName:
    """`pull-3f9a2c…`: serves all push-consumer instances of a Ray node, by the beginning of the node's id."""

    node_id: str

    def __str__(self) -> str:
        return f"pull-{self.node_id[:NODE_ID_SHOWN]}"


@dataclass(frozen=True, slots=True, order=True)
class PredicateName:
    """`predicate-STORAGE-3f9a2c…-GROUP-0a1b…`: runs one predicate of a group beside a storage actor, on that node.

    `user`: as whom it reads, at the end of the name; empty where nobody is named.
    """

    storage: str
    node_id: str
    group: str
    key: str
    user: str = ""

    def __str__(self) -> str:
        name = f"predicate-{self.storage}-{self.node_id[:NODE_ID_SHOWN]}-{self.group}-{self.key}"
        return f"{name}-{self.user}" if self.user else name


@dataclass(frozen=True, slots=True, order=True)
class InstanceName:
    """`pull-GROUP-0`: instance 0 of a push consumer, a member of its group under this name."""

    group: str
    instance: int

    def __str__(self) -> str:
        return f"pull-{self.group}-{self.instance}"

    @classmethod
    def parse(cls, text: str) -> InstanceName:
        """The name that `text` is the string of; a group's name may have hyphens, too. InvalidArgumentError."""
        kind, _, rest = text.partition("-")
        group, _, instance = rest.rpartition("-")
        if kind != "pull" or not group or not instance.isdecimal():
            raise InvalidArgumentError(f"{text!r} names no instance of a push consumer (pull-GROUP-0)")
        return cls(group, int(instance))
