"""A thread in each actor that reports the actor's metrics to Ray's agent, every REPORT_INTERVAL_S.

Ray drops a gauge that was not reported for 20 s. The separate thread keeps long tasks of the actor from delaying a
report. Each actor reports `raymq_up`, and the metrics of its sources (raymq.telemetry.metrics.reporter).
"""

from __future__ import annotations

import threading

from raymq.common.config.metrics import MetricsSettings
from raymq.telemetry.metrics.instruments import REPORT_INTERVAL_S
from raymq.telemetry.metrics.reporter import Reporter, Source


class MetricsThread:
    """Reports an actor's metrics from its construction until `close`. Starts no thread if metrics are off."""

    def __init__(
        self,
        settings: MetricsSettings | None,
        role: str,
        name: str,
        *sources: Source,
        broker: str = "",
        storage: str = "",
        interval_s: float = REPORT_INTERVAL_S,
    ) -> None:
        """`settings`: the settings of metrics, or None if metrics are off. `role` and `name`: the labels of the series
        `raymq_up`. `broker` and `storage`: values of two labels that all series of this process get."""
        self._sources = (lambda reporter: reporter.gauge("raymq_up", 1, role=role, name=name), *sources)
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._reporter: Reporter | None = None
        if settings is None or not settings.options.enable:
            return
        self._reporter = Reporter(
            settings.cluster,
            broker,
            storage,
            per_topic_max=settings.options.per_topic_max,
            per_group_max=settings.options.per_group_max,
        )
        threading.Thread(target=self._run, args=(self._reporter,), name="metrics", daemon=True).start()

    def limit(self, per_topic_max: int, per_group_max: int) -> None:
        """Limit the number of topics and groups for which separate series are reported (live settings)."""
        if self._reporter is not None:
            self._reporter.limit(per_topic_max, per_group_max)

    def close(self) -> None:
        """Stop reporting. Does not wait for a running report, which may wait for another actor. Idempotent."""
        self._stop.set()

    def _run(self, reporter: Reporter) -> None:
        while not self._stop.wait(self._interval_s):
            reporter.report(*self._sources)
