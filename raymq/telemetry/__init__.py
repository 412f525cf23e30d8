"""The metrics of a process, and the tracing of messages."""
