"""Client metrics of a single test, from which the test reads the counted values."""

from __future__ import annotations

from raymq.telemetry.metrics.client_figures import ClientFigures


class Counted(ClientFigures):
    """Client metrics of a single test. The test replaces a module's CLIENT_FIGURES by an instance of this
    class."""

    def values(self, name: str) -> dict[tuple[str, ...], int]:
        """Return how many values a histogram received, by the histogram's labels."""
        return {key[1:]: sum(one.figures().counts) for key, one in self._histograms.items() if key[0] == name}

    def out_bytes(self) -> dict[tuple[str, str], int]:
        """Return how many bytes each consumer group received, by topic and group."""
        return dict(self._out_bytes)
