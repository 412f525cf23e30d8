"""The actors of the gateway, which serve clients of RocketMQ 5 outside Ray."""
