"""Administrators' questions to live members of consumer groups, and the members' answers."""
