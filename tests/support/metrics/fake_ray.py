"""A stand-in for ray.util.metrics that checks calls as Ray does, and stores the reported values."""

from __future__ import annotations

from types import ModuleType


class FakeMetrics:
    """The metric values that raymq reported: the sum of each counter and the last value of each gauge, by name and
    tags."""

    def __init__(self):
        self.values: dict[tuple[str, frozenset], float] = {}
        self.failing = False

    def value(self, name, **tags):
        """Return the value of the only series with this name and these tags."""
        [value] = self.series(name, **tags)
        return value

    def series(self, name, **tags):
        """Return the values of all series with this name and these tags."""
        return [value for (one, has), value in self.values.items() if one == name and tags.items() <= set(has)]

    def module(self):
        """Return a replacement for the module ray.util.metrics."""
        fake = self

        class Metric:
            def __init__(self, name, description="", tag_keys=()):
                assert isinstance(tag_keys, tuple)
                assert description
                self.name, self.keys = name, tag_keys

            def record(self, value, tags, *, add):
                if fake.failing:
                    raise RuntimeError("the agent does not answer")
                assert set(tags) == set(self.keys)
                assert all(isinstance(text, str) for text in tags.values())
                key = (self.name, frozenset(tags.items()))
                fake.values[key] = value + (fake.values.get(key, 0) if add else 0)

        class Counter(Metric):
            def inc(self, value, tags=None):
                if value <= 0:
                    raise ValueError(f"value must be >0, got {value}")
                self.record(value, tags, add=True)

        class Gauge(Metric):
            def set(self, value, tags=None):
                self.record(value, tags, add=False)

        module = ModuleType("ray.util.metrics")
        module.Counter, module.Gauge = Counter, Gauge
        return module
