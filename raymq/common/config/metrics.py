"""The settings of metrics: the section `metrics` of raymq.yaml, and the settings that each actor gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import ConfigDict, Field

from raymq.common.config.section import SettingsSection


class MetricsOptions(SettingsSection):
    """The section `metrics` of raymq.yaml: whether actors report metrics, and how many topics and groups have separate
    time series."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enable: bool = True
    """`true`: the actors report metrics to Ray, for Prometheus."""
    per_topic_max: Annotated[int, Field(ge=0, le=100_000)] = 500
    """Maximum number of topics with separate time series, in each process. The metrics of all other topics are
    summed."""
    per_group_max: Annotated[int, Field(ge=0, le=100_000)] = 500
    """Maximum number of consumer groups with separate time series, in each process. The metrics of all other groups are
    summed."""


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """The metrics settings of one actor: the cluster's name, which is a metric label, and the section `metrics` of
    raymq.yaml."""

    cluster: str = "raymq"
    options: MetricsOptions = field(default_factory=MetricsOptions)
