"""Questions of administrators to the live members of consumer groups, and what the members answer."""
