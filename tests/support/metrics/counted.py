"""The client metrics that a test counts."""

from __future__ import annotations

from raymq.telemetry.metrics.client_figures import ClientFigures


class Counted(ClientFigures):
    """Client metrics of one test. A test puts an instance in the place of CLIENT_FIGURES in a module."""

    def values(self, name: str) -> dict[tuple[str, ...], int]:
        """Return the number of values that a histogram received, by its labels."""
        return {key[1:]: sum(one.figures().counts) for key, one in self._histograms.items() if key[0] == name}

    def out_bytes(self) -> dict[tuple[str, str], int]:
        """Return the number of bytes that groups received, by topic and group."""
        return dict(self._out_bytes)
