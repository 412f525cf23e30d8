"""Request-reply: the requests of a client that wait, the watch of their replies, and the replies of listeners."""
