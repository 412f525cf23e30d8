"""Request-reply: the waiting requests of a client, the reader of their replies, and the replies of listeners."""
