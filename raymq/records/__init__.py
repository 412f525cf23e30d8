"""The bytes of RocketMQ's log: the format of a record, loops over many records, filters, and reading a store's
files."""
