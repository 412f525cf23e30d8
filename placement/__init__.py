"""The servers of a cluster: the plan of their nodes, start and stop, master election, repair, and status."""
