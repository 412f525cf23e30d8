"""Generate the Kubernetes objects of a raymq cluster under KubeRay from the number and size of its stores.

KubeRay creates pods but no StatefulSets. Therefore each store is a worker group of one pod with a volume claim of its
own: a pod that is created again gets its disk back. These modules need neither Ray nor Kubernetes.
"""
