"""The checks, by subject: pure functions from a Snapshot to findings, so that tests need no machine to be ill."""
