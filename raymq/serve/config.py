"""Configuration of tasks on raymq. RaymqAdapterConfig is the `adapter_config` of a TaskProcessorConfig. TaskSettings
has the settings that follow from both configs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from raymq.common.errors import ConfigError, InvalidArgumentError
from raymq.common.message import DELAY_LEVELS_MAX
from raymq.common.names import check_group, check_user_topic
from raymq.common.numbers import LONGEST_TIME_S, NUMBER_MAX
from raymq.common.protocol.group import checked_intervals

TASK_GROUP_PREFIX: Final = "serve-"
RESULTS_SUFFIX: Final = "-results"


class RaymqAdapterConfig(BaseModel):
    """The `adapter_config` for tasks on raymq. Every field has a default. The config is pickled with the deployment.

    `address`: the Ray cluster, host:port, for programs outside the cluster; by default the Ray cluster to which the
    process is connected. `namespace`: the namespace of `raymq.connect`. `group`: the consumer group of the replicas, by
    default ``serve-QUEUE``. `result_topic`: the topic of the tasks' states and results, by default ``QUEUE-results``.
    `result_ttl_s`: the time in s for which the state of an ended task is returned. `queues`: the number of queues of
    the topics that the adapter creates. With the consume mode "queue" it must be at least the number of replicas,
    because a replica without a queue gets no tasks. `poll_max`: the maximum number of tasks that a replica receives at
    a time; its default and its limit are the replica's concurrency. `first_retry_level`: the delay level before the
    first retry, 1 to 18 for 1 s to 2 h. Each further retry waits one level longer, up to 1 min, or up to the first
    level if that is longer. `retry_intervals_s`: the seconds before the first retry, the second and so on, instead of
    levels; the last value counts for all further retries (`raymq.exponential_intervals` makes growing ones). They
    become the group's setting. `consume_mode`: "share" if the replicas share single tasks, so that any number of
    replicas is busy; "queue" if they share the queues. All replicas of a group need the same mode.
    `priorities`: True if tasks have priorities from 0 to 9. The adapter then creates the task queue as a topic of the
    type PRIORITY, with ten queues in each broker group. It needs the consume mode "share".
    `replica_deaths_max`: an attempt to run a task counts as failed if this many replicas have died while they ran it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str | None = None
    namespace: str | None = None
    group: str | None = None
    result_topic: str | None = None
    result_ttl_s: float = Field(default=86_400.0, ge=0.001, le=LONGEST_TIME_S, strict=True)
    queues: int = Field(default=16, ge=1, le=1024, strict=True)
    poll_max: int | None = Field(default=None, ge=1, le=NUMBER_MAX, strict=True)
    first_retry_level: int = Field(default=1, ge=1, le=DELAY_LEVELS_MAX, strict=True)
    retry_intervals_s: tuple[float, ...] = ()
    consume_mode: Literal["queue", "share"] = "queue"
    priorities: bool = Field(default=False, strict=True)
    replica_deaths_max: int = Field(default=3, ge=1, le=NUMBER_MAX, strict=True)

    @field_validator("retry_intervals_s")
    @classmethod
    def _check_intervals(cls, intervals_s: tuple[float, ...]) -> tuple[float, ...]:
        """Refuse intervals that a group cannot have. Pydantic reports the ValueError."""
        try:
            return checked_intervals(intervals_s)
        except InvalidArgumentError as error:
            raise ValueError(str(error)) from None


class ProcessorConfig(Protocol):
    """The fields of ray.serve.schema.TaskProcessorConfig that raymq uses."""

    queue_name: str
    adapter_config: Any
    max_retries: int | None
    failed_task_queue_name: str | None
    unprocessable_task_queue_name: str | None


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """The topics, the consumer group and the retry rules of one task queue. If `max_retries` is None, failed tasks are
    retried without limit."""

    queue: str
    group: str
    results: str
    max_retries: int | None
    failed_queue: str | None
    unprocessable_queue: str | None
    options: RaymqAdapterConfig

    @classmethod
    def of(cls, config: ProcessorConfig) -> TaskSettings:
        """Create the TaskSettings from a TaskProcessorConfig. Its `adapter_config` is a RaymqAdapterConfig, a mapping
        of its fields, or None for the defaults. Raises ConfigError if the config is inconsistent, and IllegalNameError
        if a topic or group name is illegal."""
        options = _options(config.adapter_config)
        retries = config.max_retries
        if retries is not None and retries < 0:
            raise ConfigError(f"max_retries must be 0 or more, or None to retry for ever, not {retries}")
        settings = cls(
            check_user_topic(config.queue_name),
            check_group(options.group or TASK_GROUP_PREFIX + config.queue_name),
            check_user_topic(options.result_topic or config.queue_name + RESULTS_SUFFIX),
            retries,
            config.failed_task_queue_name or None,
            config.unprocessable_task_queue_name or None,
            options,
        )
        for topic in settings.topics:
            check_user_topic(topic)
        if options.priorities and options.consume_mode != "share":
            raise ConfigError(
                'priorities=True needs consume_mode="share": in the mode "queue" each replica gets the tasks of its '
                "own queues, whatever their priorities"
            )
        if {settings.queue, settings.results} & {settings.failed_queue, settings.unprocessable_queue} or (
            settings.queue == settings.results
        ):
            raise ConfigError(
                f"the topics of the tasks ({settings.queue!r}), of their results ({settings.results!r}) and of "
                "their dead queues must differ"
            )
        return settings

    @property
    def topics(self) -> list[str]:
        """The names of all topics of the task queue; the topic of the tasks is the first."""
        topics = [self.queue, self.results, self.failed_queue, self.unprocessable_queue]
        return list(dict.fromkeys(topic for topic in topics if topic is not None))


def _options(given: Any) -> RaymqAdapterConfig:
    if isinstance(given, RaymqAdapterConfig):
        return given
    if given is None:
        return RaymqAdapterConfig()
    if not isinstance(given, dict):
        raise ConfigError(f"adapter_config must be a raymq.serve.RaymqAdapterConfig, not a {type(given).__name__}")
    try:
        return RaymqAdapterConfig(**given)
    except ValidationError as error:
        raise ConfigError(f"adapter_config: {error}") from None
