"""Reads the metrics of the agents of all Ray nodes, and parses them as Prometheus does."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from typing import NamedTuple

import ray
from prometheus_client.parser import text_string_to_metric_families

PAUSE_S = 1.0
"""Pause between two scrapes, in seconds. Ray's agents update their metrics every 10 s."""


class Sample(NamedTuple):
    """A sample of one metric series of one Ray node's agent. `name` does not have Ray's prefix."""

    name: str
    labels: dict[str, str]
    value: float


class Scrape:
    """The metric samples of all Ray nodes at one moment."""

    def __init__(self, texts: list[str]) -> None:
        self.samples = [
            Sample(sample.name.removeprefix("ray_"), sample.labels, sample.value)
            for text in texts
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("ray_raymq_")
        ]

    @classmethod
    def now(cls) -> Scrape:
        """Scrape the metrics ports of all live Ray nodes now."""
        return cls([_read(node) for node in ray.nodes() if node["Alive"]])

    def values(self, name: str, **labels: str) -> list[float]:
        """Return the values of all series with this name and these labels."""
        return [one.value for one in self.samples if one.name == name and labels.items() <= one.labels.items()]

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of all series with this name and these labels."""
        return sum(self.values(name, **labels))


def _read(node: dict) -> str:
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def scraped(condition: Callable[[Scrape], bool], what: str, timeout_s: float = 60.0) -> Scrape:
    """Scrape repeatedly until `condition` is true for a scrape, and return that scrape. Raises AssertionError with all
    series if the timeout expires."""
    deadline_s = time.monotonic() + timeout_s
    while not condition(scrape := Scrape.now()):
        if time.monotonic() > deadline_s:
            series = "\n".join(f"{one.name} {one.labels} {one.value:g}" for one in scrape.samples)
            raise AssertionError(f"{what} was not scraped within {timeout_s:g} s; there is\n{series}")
        time.sleep(PAUSE_S)
    return scrape
