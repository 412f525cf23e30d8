"""Rights in the console: tokens, sessions, the gate that asks for them, and headers of answers."""
