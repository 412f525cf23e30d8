"""`raymq doctor`: checks for common faults of a machine and a cluster.

`collect/` reads facts about this machine, each node and the cluster into a DoctorSnapshot (facts.py). Each check in
`checks/` is a pure function from the snapshot to findings. `examination.py` runs both, and makes safe repairs.
"""
