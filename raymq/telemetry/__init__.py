"""The metrics of a process, and the trace of messages."""
