"""The settings of metrics: the section `metrics` of raymq.yaml, and the settings that an actor gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import ConfigDict, Field

from raymq.common.config.section import SettingsSection


class MetricsOptions(SettingsSection):
    """The section `metrics` of raymq.yaml: whether actors report, and how many topics and groups have separate
    series."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable: bool = True
    """`true`: the actors report metrics to Ray, for Prometheus."""
    per_topic_max: Annotated[int, Field(ge=0, le=100_000)] = 500
    """Number of topics with separate series, for each process. The other topics are summed."""
    per_group_max: Annotated[int, Field(ge=0, le=100_000)] = 500
    """Number of consumer groups with separate series, for each process. The other groups are summed."""


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """The settings of one actor's metrics: the cluster's name, which is a label, and the section of raymq.yaml."""

    cluster: str = "raymq"
    options: MetricsOptions = field(default_factory=MetricsOptions)
