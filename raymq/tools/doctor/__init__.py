"""`raymq doctor`: finds what goes wrong in practice, before it does or afterwards.

`collect/` looks at this machine, at each node and at the cluster, and fills a DoctorSnapshot (facts.py). `checks/`
judges it: each check is a pure function from the snapshot to findings. `examination.py` joins the two and mends what
can be mended without risk.
"""
