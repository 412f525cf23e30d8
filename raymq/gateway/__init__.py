"""RocketMQ 5's gRPC protocol for a raymq cluster.

`raymq.gateway.wire` has the protocol's messages, and `raymq.gateway.convert` converts them to raymq's values. Importing
this package imports neither protobuf nor gRPC.
"""
