"""Queries of administrators to live members of consumer groups, and the members' answers."""
