"""The servers of a cluster: the plan of what runs where, starting and stopping, election, repair, and status."""
