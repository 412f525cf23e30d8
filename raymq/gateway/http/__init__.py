"""The HTTP face of the gateway, for curl, web hooks and programs without a RocketMQ client.

    curl, browsers ──JSON──▶ http ──requests of the protocol──▶ service ──▶ brokers and stores
    RocketMQ 5     ──gRPC──▶ front ────────────────────────────▶

A request's JSON becomes a request of RocketMQ's protocol, and the service answers both faces. So checks, rights, quotas
and the window of repeated sends are the same, and a message has the same bytes in the store. Two things have no call in
the protocol: live tails (`raymq.client.admin.live_tails`) and tasks of Ray Serve (`raymq.serve`).

`HttpFront` owns the port, TLS, and the bounds of connections and of the bytes of all bodies. The cluster bounds the
receives that wait, and the tails bound their viewers.
"""
