"""The rules for names of topics and groups, and the names of actors.

Rules for topics and groups are RocketMQ's (spec/messaging.md §2.5). An actor's name is an object that formats and
parses its own text, so that no module builds the text itself: `storage-broker-a-0` is `StorageName("broker-a", 0)`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from raymq.common.errors import IllegalNameError, InvalidArgumentError

NAMESPACE: Final = "raymq"
"""The Ray namespace of every raymq actor."""

INSTANCES: Final = "raymq-instances"
"""The Ray namespace of actors that run users' functions: Listeners of push consumers, and PredicateRunners."""

CONTROLLER: Final = "controller"
"""Name of the Controller actor, which elects the masters of broker groups that have several replicas."""

BROKER_GROUPS_MAX: Final = 26
"""Maximum number of broker groups in a cluster. A letter names each group, from broker-a to broker-z."""
REPLICAS_OF_GROUP_MAX: Final = 9
"""Maximum number of replicas of a broker group."""
USERS_BROKER: Final = "broker-a"
"""Name of the first broker group, which stores the changes of users and policies."""

CONSOLE: Final = "console"
"""Name of the actor that serves the web console, if the cluster has a console."""

GATEWAY_PREFIX: Final = "gateway-"
"""Prefix of the names of all gateway processes (GatewayName)."""

WEBHOOK_GROUP: Final = "raymq-webhooks"
"""The consumer group of the gateways' web hooks. It has no members: each gateway process receives for it."""

TOPIC_NAME_MAX: Final = 127
INTERNAL_TOPIC_NAME_MAX: Final = 255
GROUP_NAME_MAX: Final = 120
RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
LMQ_PREFIX: Final = "%LMQ%"
"""The name prefix of light queues. A message that names light queues is put into these light queues in addition to its
own queue (storage/dispatch/multi_dispatch.py)."""
SYSTEM_PREFIX: Final = "rmq_sys_"
STATE_TOPIC: Final = SYSTEM_PREFIX + "broker_state"
"""The topic that contains the records of a broker's state. It is in the store of the broker's own group
(actors.broker.state_log)."""
REPLY_SUFFIX: Final = "_REPLY_TOPIC"
"""The name suffix of the topic that contains the replies to a cluster's requests. The topic's name begins with the
cluster's name."""
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
"""The topic that contains the messages of open transactions. It has one queue, 0."""
OP_HALF_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
"""The topic that contains op records. An op record names half messages whose transactions have ended."""
CHECK_MAX_TIME_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
"""The topic that receives half messages whose outcome remained unknown after all checks."""
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"
"""The default topic of trace records (raymq.telemetry.trace). A client may name another topic."""
AUTO_CREATE_TOPIC: Final = "TBW102"
"""The topic whose permission a new topic gets if a send creates the new topic. Only brokers that create topics at the
first send have this topic."""

TRANSACTION_TOPICS: Final = frozenset((HALF_TOPIC, OP_HALF_TOPIC, CHECK_MAX_TIME_TOPIC))
"""The topics to which only transactions write."""

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
"""RocketMQ's predefined consumer and producer groups (spec/messaging.md §2.7)."""

REBALANCE_SLOTS: Final = 4
"""Number of slots (shares) into which all consumer groups are divided by the groups' names. This number is also the
maximum number of Rebalance actors in a cluster."""

NODE_ID_SHOWN: Final = 16
"""Number of hexadecimal digits of a Ray node's id that raymq shows; the whole id has 56 digits."""

_LEGAL: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
_RULE: Final = "use letters, digits and the characters % | - _"


def is_system_topic(topic: str) -> bool:
    """True if `topic` is a system topic: users may not create it, delete it or send to it."""
    return topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_PREFIX) or topic.endswith(REPLY_SUFFIX)


def is_internal_topic(topic: str) -> bool:
    """True if `topic` is internal: the server created it for its own use or for a group, or it is a light queue. Users
    do not create internal topics by name."""
    return is_system_topic(topic) or topic.startswith((RETRY_PREFIX, DLQ_PREFIX, LMQ_PREFIX))


def is_light_queue(topic: str) -> bool:
    """True if `topic` is the topic of a light queue (`light_queue`)."""
    return topic.startswith(LMQ_PREFIX)


def light_queue(name: str) -> str:
    """Return the name of the topic from which consumers read the light queue `name`:
    ``consumer.subscribe(raymq.light_queue("alice"))``.

    The topic has one queue, 0, in each broker group. The queue contains the messages whose `Message.light_queues`
    contain `name`. Raises IllegalNameError if the topic's name is not legal.

    >>> light_queue("alice")
    '%LMQ%alice'
    """
    if not isinstance(name, str) or not name.strip():
        raise _no_name("light queue", name)
    if name.startswith(LMQ_PREFIX):
        raise IllegalNameError("light queue", name, f"raymq adds the prefix {LMQ_PREFIX} itself")
    return _check("light queue", LMQ_PREFIX + name, INTERNAL_TOPIC_NAME_MAX)


def is_system_group(group: str) -> bool:
    """True if `group` belongs to the server or its tools. A system group may be used without being created."""
    return group in SYSTEM_GROUPS or group.startswith(SYSTEM_GROUP_PREFIX)


def retry_topic(group: str) -> str:
    """Return the name of a group's retry topic, which delivers failed messages again."""
    return RETRY_PREFIX + group


def dlq_topic(group: str) -> str:
    """Return the name of a group's dead-letter topic. It contains the messages that the group failed to consume in all
    its attempts."""
    return DLQ_PREFIX + group


def reply_topic(cluster: str) -> str:
    """Return the name of the topic that contains the replies to a cluster's requests.

    >>> reply_topic("raymq")
    'raymq_REPLY_TOPIC'
    """
    return cluster + REPLY_SUFFIX


def check_topic(topic: str) -> str:
    """Return `topic` if it is a legal topic name (spec/messaging.md §2.5), else raise IllegalNameError."""
    internal = isinstance(topic, str) and topic.startswith((RETRY_PREFIX, DLQ_PREFIX, LMQ_PREFIX))
    return _check("topic", topic, INTERNAL_TOPIC_NAME_MAX if internal else TOPIC_NAME_MAX)


def check_user_topic(topic: str) -> str:
    """Return `topic` if it is a legal topic name and not a system topic, else raise IllegalNameError."""
    check_topic(topic)
    if is_system_topic(topic):
        raise IllegalNameError("topic", topic, "the name belongs to a system topic")
    if is_light_queue(topic):
        raise IllegalNameError(
            "topic",
            topic,
            "a light queue gets messages only through other topics: pass its name in the light_queues of messages",
        )
    return topic


def check_group(group: str) -> str:
    """Return `group` if it is a legal name of a producer or consumer group, else raise IllegalNameError."""
    return _check("group", group, GROUP_NAME_MAX)


def _check(kind: str, name: str, longest: int) -> str:
    if not isinstance(name, str) or not name.strip():
        raise _no_name(kind, name)
    if not _LEGAL.fullmatch(name):
        raise IllegalNameError(kind, name, _RULE)
    if len(name) > longest:
        raise IllegalNameError(kind, name, f"the name has {len(name)} characters; at most {longest} are allowed")
    return name


def _no_name(kind: str, name: object) -> IllegalNameError:
    """Return the error about a name that is blank or not a text."""
    if isinstance(name, str):
        return IllegalNameError(kind, name, "the name is blank")
    return IllegalNameError(kind, str(name), f"it must be one text (str), not {type(name).__name__}")


@dataclass(frozen=True, slots=True, order=True)
class NameServerName:
    """Name of a NameServer actor, such as `nameserver-0`."""

    index: int

    def __str__(self) -> str:
        return f"nameserver-{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class StorageName:
    """Name of a storage actor: `storage-broker-a-0` is replica 0 of broker group `broker-a`."""

    broker_name: str
    replica: int

    def __str__(self) -> str:
        return f"storage-{self.broker_name}-{self.replica}"

    @classmethod
    def parse(cls, text: str) -> StorageName:
        match = re.fullmatch(r"storage-(.+)-(\d+)", text)
        if match is None:
            raise IllegalNameError("storage actor", text, "write storage-BROKER-REPLICA, such as storage-broker-a-0")
        return cls(match[1], int(match[2]))


@dataclass(frozen=True, slots=True, order=True)
class ReplicatorName:
    """Name of a replicator actor: `replicator-broker-a-1` copies the log to replica 1 of broker group
    `broker-a`."""

    broker_name: str
    replica: int

    def __str__(self) -> str:
        return f"replicator-{self.broker_name}-{self.replica}"


@dataclass(frozen=True, slots=True, order=True)
class RebalanceName:
    """Name of a Rebalance actor, such as `rebalance-0`. Rebalance actors assign the queues of consumer groups."""

    index: int

    def __str__(self) -> str:
        return f"rebalance-{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class PullName:
    """Name of a Pull actor, such as `pull-3f9a2c…`, which serves all push-consumer instances of a Ray node. The name
    contains the beginning of the node's id."""

    node_id: str

    def __str__(self) -> str:
        return f"pull-{self.node_id[:NODE_ID_SHOWN]}"


@dataclass(frozen=True, slots=True, order=True)
class GatewayName:
    """Name of a gateway process, such as `gateway-3f9a2c…-0`: the beginning of its node's id, and its number on the
    node."""

    node_id: str
    index: int

    def __str__(self) -> str:
        return f"{GATEWAY_PREFIX}{self.node_id[:NODE_ID_SHOWN]}-{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class PredicateName:
    """Name of a predicate actor, such as `predicate-STORAGE-3f9a2c…-GROUP-0a1b…`. The actor runs one predicate of a
    consumer group on the node of a storage actor.

    `user`: the user in whose name the predicate's actor reads messages; empty without access control. The actor's name
    ends with it.
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
    """Name of a push-consumer instance: `pull-GROUP-0` is instance 0. The instance is a member of its group under this
    name."""

    group: str
    instance: int

    def __str__(self) -> str:
        return f"pull-{self.group}-{self.instance}"

    @classmethod
    def parse(cls, text: str) -> InstanceName:
        """Parse an instance name such as `pull-GROUP-0`; the group's name may contain hyphens. Raises
        InvalidArgumentError if `text` has another form."""
        kind, _, rest = text.partition("-")
        group, _, instance = rest.rpartition("-")
        if kind != "pull" or not group or not instance.isdecimal():
            raise InvalidArgumentError(f"{text!r} is not the name of a push consumer's instance, such as pull-GROUP-0")
        return cls(group, int(instance))
