"""Lanes: streams into a server's process, for calls that are too frequent for actor calls.

A change of the bytes between a lane's two ends belongs here. A lane is one connection: over an abstract Unix socket on
the server's node, which needs no file, so that a killed process leaves nothing behind; over TCP between nodes, within
TLS where Ray uses it. Address and secret come from an actor call, so whoever may call the actor may open a lane.
Nothing that arrives is unpickled, on either side.

Handshake, all of it fixed in size
    server → client   | "RMQL" 4 | version 2 | zero 2 | random 32 |
    client → server   | "RMQL" 4 | version 2 | zero 2 | random 32 | name length 1 | a user's name 127 |
                      | HMAC of "client", the server's hello and all of this so far 32 |
                      | HMAC of "user" and the same, with the user's key; zeros without a user 32 |
    server → client   | verdict 1 | HMAC of "server", the verdict and both hellos 32 |
The HMAC is SHA-256, with the lane's secret where nothing else is said. The first six bytes of a hello never change, so
that two versions can tell each other apart. A client without the secret is dropped without a verdict; verdict 1 opens
the lane, 2 says that the server has as many connections as it takes, 3 that it speaks another version, 4 that the
client does not sign as a user whom it takes, 5 that it does not know the users yet. Only servers that were given users
ask for them.

A frame, little-endian (frames.py)
    | payload length 4 | kind 1 | flags 1 | count 2 | correlation 8 | payload |
    and on TCP, behind the correlation, the CRC-32 of these 16 bytes: | crc 4 |
An answer has the kind and the correlation of its request. Its flag 1 says that the payload is an error: msgpack of
[class name, arguments, text]. The client rebuilds errors of raymq.common.errors by the class's name, and knows no
others.

    kind       request                                          answer
    1 OPEN     a queue's name for a handle (appends.py)         none
    2 APPEND   `count` batches (appends.py)                     `count` results
    3 FETCH    `count` queues and offsets (reads.py)            `count` results with records, after a wait
    4 WAIT     `count` queues and offsets (reads.py)            `count` ends, once one of them has something
    5 CALL     a method and its arguments (calls.py)            its result
    6 READ_LOG     a slave's position (log_chunks.py)           a chunk of the log, after a wait
    7 APPEND_LOG   a chunk of the log (log_chunks.py)           the end on the slave's disk, once the chunk is there
    8 ACK_LOG      a slave's position (log_chunks.py)           none
A server may give other kinds a meaning. A WAIT takes the place of the one before on its connection, which then gets no
answer. Requests of one connection may be answered in any order.

Modules: address (where a server is), handshake, frames, turns (who may send a large frame), connection and server (the
server's end), client (the other end), and the payloads in appends, reads, calls and log_chunks.
"""
