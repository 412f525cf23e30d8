"""The server side of raymq: one Ray actor per module, each a thin shell over a pure core in `actors.core`."""
