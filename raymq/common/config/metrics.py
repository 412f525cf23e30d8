"""The settings of metrics: the section `metrics` of raymq.yaml, and what an actor is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import ConfigDict, Field

from raymq.common.config.section import SettingsSection


class MetricsOptions(SettingsSection):
    """The options of metrics: if there are any, and how many topics and groups have series of their own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable: bool = True
    """`true`: the actors report metrics to Ray, for Prometheus."""
    per_topic_max: Annotated[int, Field(ge=0, le=100_000)] = 500
    """Number of topics with separate series, for each process. The other topics are summed."""
    per_group_max: Annotated[int, Field(ge=0, le=100_000)] = 500
    """Number of consumer groups with separate series, for each process. The other groups are summed."""


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """The settings of one actor's metrics: its cluster's name, for the label, and the section of raymq.yaml."""

    cluster: str = "raymq"
    options: MetricsOptions = field(default_factory=MetricsOptions)
