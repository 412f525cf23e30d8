"""raymq in Kubernetes, by KubeRay: the objects of a cluster, made from the number and size of its stores.

KubeRay makes pods one by one and no StatefulSets, so each store is a worker group of one pod with a claim of its own: a
pod that is made again gets its disk back. Needs neither Ray nor Kubernetes.
"""
