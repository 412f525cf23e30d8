"""Web hooks: the calls by which the gateway reports the ends of tasks to other programs."""
