"""Commands about the live members of groups: connections, running information, direct consumption, producers."""
