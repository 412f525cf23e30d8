"""Conversions between RocketMQ 5's gRPC messages and raymq's values, with all checks of requests.

The modules use no Ray, no clock, no thread and no network: a caller passes the time.
"""
