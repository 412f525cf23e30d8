"""RocketMQ 5's gRPC protocol for a raymq cluster.

`raymq.gateway.wire` has the protocol's messages. Importing this package imports neither protobuf nor gRPC.
"""
