"""The state of a gateway process about its clients: their streams, the sends that they may repeat, their rights, and
how much of their quotas they have used. No client needs this state after its connection has ended."""
