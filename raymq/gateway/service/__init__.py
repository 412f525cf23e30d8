"""The calls of RocketMQ 5's gRPC protocol, on raymq: one module for each family of calls. The service has no object of
a gRPC server, and keeps nothing that a client needs after its connection has ended."""
