"""Collectors of facts about machines, nodes, the cluster and its metrics. Collectors only read facts; the checks
evaluate them."""
