"""`raymq doctor`: checks a machine and a cluster for common faults.

`collect/` reads facts about this machine, each node and the cluster into a DoctorSnapshot (facts.py). Each check in
`checks/` is a pure function from the snapshot to findings. `examination.py` collects the facts, runs the checks, and
makes safe repairs.
"""
