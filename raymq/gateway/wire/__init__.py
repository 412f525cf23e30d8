"""The messages of RocketMQ 5's gRPC protocol, without code that a compiler generated.

`table.py` lists the fields, `enums.py` the enumerations. `messages.py` makes classes of both at import, which needs
protobuf. No other module of raymq imports protobuf.
"""
