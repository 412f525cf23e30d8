"""Generate the Kubernetes objects of a raymq cluster under KubeRay from the number and size of its stores.

KubeRay creates pods but no StatefulSets. Therefore each store is a worker group of one pod with its own volume claim.
If Kubernetes creates the pod again, the pod gets its old disk back. These modules need neither Ray nor Kubernetes.
"""
