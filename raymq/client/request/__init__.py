"""Request-reply: a client's requests that wait, the reader of their replies, and the sender of a listener's
replies."""
