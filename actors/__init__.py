"""The server side of raymq: one Ray actor per module, each a thin wrapper around a pure core in `actors.core`."""
