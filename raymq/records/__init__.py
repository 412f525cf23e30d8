"""The bytes of RocketMQ's log: the record format, functions that process many records at once, filters, and readers of
a store's files."""
