"""RocketMQ 5's gRPC protocol for a raymq cluster.

`wire` has the protocol's messages, and `convert` converts them to raymq's values. `service` carries out the calls, and
`front` is the gRPC server. Importing this package imports neither protobuf nor gRPC.
"""
