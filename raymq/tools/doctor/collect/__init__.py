"""The collectors of facts about machines, nodes, the cluster and its metrics. Collectors judge nothing."""
