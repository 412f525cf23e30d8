"""Access control of the web console: tokens, sessions, the middleware that checks them, and security headers."""
