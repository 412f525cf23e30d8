"""The gRPC server of a gateway. It carries bytes between connections and handlers, and has no message of any
protocol."""
