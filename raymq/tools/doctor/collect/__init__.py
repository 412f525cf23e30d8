"""The collectors: they look at machines, nodes, the cluster and its metrics, and judge nothing."""
