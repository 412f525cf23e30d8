"""The console's view of a cluster: a protocol, and the plain values that it deals in."""
