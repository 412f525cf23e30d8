"""What the clients of a test have counted."""

from __future__ import annotations

from raymq.telemetry.metrics.client_figures import ClientFigures


class Counted(ClientFigures):
    """Figures of one test, to be put in the place of CLIENT_FIGURES in a module."""

    def values(self, name: str) -> dict[tuple[str, ...], int]:
        """The number of values of a histogram, by its labels."""
        return {key[1:]: sum(one.figures().counts) for key, one in self._histograms.items() if key[0] == name}

    def out_bytes(self) -> dict[tuple[str, str], int]:
        """The bytes that groups have got, by topic and group."""
        return dict(self._out_bytes)
