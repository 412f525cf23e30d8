"""The servers of a cluster: the plan of their nodes, start and stop, election, repair, and status."""
