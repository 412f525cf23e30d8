"""The web console's actor, and its view of a live cluster."""
