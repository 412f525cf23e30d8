"""Lanes: socket connections into a server's process, for calls that are too frequent for Ray actor calls.

To change the bytes between a lane's two ends, change this package. A lane is one connection. On the server's node it is
an abstract Unix socket, which needs no file, so a killed process leaves nothing behind. Between nodes it is TCP, within
TLS if Ray uses TLS. A client gets the lane's address and secret from an actor call, so every caller of the actor may
open a lane. Neither side unpickles received bytes.

Handshake, with parts of fixed sizes
    server → client   | "RMQL" 4 | version 2 | zero 2 | random 32 |
    client → server   | "RMQL" 4 | version 2 | zero 2 | random 32 | name length 1 | a user's name 127 |
                      | HMAC of "client", the server's hello and all of this so far 32 |
                      | HMAC of "user" and the same, with the user's key; zeros without a user 32 |
    server → client   | verdict 1 | HMAC of "server", the verdict and both hellos 32 |
The HMAC is SHA-256 with the lane's secret, unless another key is named. The first six bytes of a hello never change, so
two versions can recognise each other. The server drops a client without the secret, and sends no verdict. Verdict 1
opens the lane. The other verdicts refuse it: 2 the server has too many connections, 3 the server has another version, 4
the client's user or signature is not accepted, 5 the server does not have the users yet. Only servers with users check
users.

A frame, little-endian (frames.py)
    | payload length 4 | kind 1 | flags 1 | count 2 | correlation 8 | payload |
    and on TCP, behind the correlation, the CRC-32 of these 16 bytes: | crc 4 |
An answer has the kind and the correlation of its request. Flag 1 marks an error, whose payload is msgpack of [class
name, arguments, text]. The client rebuilds only errors of raymq.common.errors, by the class's name.

    kind       request                                          answer
    1 OPEN     a queue's name for a handle (appends.py)         none
    2 APPEND   `count` batches (appends.py)                     `count` results
    3 FETCH    `count` queues and offsets (reads.py)            `count` results with records, after a wait
    4 WAIT     `count` queues and offsets (reads.py)            `count` ends, once one queue has new messages
    5 CALL     a method and its arguments (calls.py)            its result
    6 READ_LOG     a slave's position (log_chunks.py)           a chunk of the log, after a wait
    7 APPEND_LOG   a chunk of the log (log_chunks.py)           the end on the slave's disk, once the chunk is there
    8 ACK_LOG      a slave's position (log_chunks.py)           none
A server may define other kinds. A WAIT replaces the earlier WAIT of its connection, which then gets no answer. Requests
of one connection may be answered in any order.

Modules: address (a server's address), handshake, frames, turns (which connection may send a large frame), connection
and server (the server's end), client (the client's end, for threads), async_client (the client's end, for an event
loop), and the payloads in appends, reads, calls and log_chunks.
"""
