"""The Kubernetes objects of a raymq cluster under KubeRay, generated from the number and size of its stores.

KubeRay creates pods and no StatefulSets. Therefore each store is a worker group of one pod with a separate volume
claim: a pod that is created again gets its disk back. The modules need neither Ray nor Kubernetes.
"""
