"""What one gateway process keeps about its clients: their streams, the sends that they may repeat, their rights, and
what they have consumed of their quotas. No client needs any of it after its connection has ended."""
