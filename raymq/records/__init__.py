"""The bytes of RocketMQ's log: the record format, loops over many records, filters, and readers of a store's files."""
