"""Figures of raymq in Ray's own Prometheus pipeline: the table of instruments, and who reports them.

Stores, cores and clients count plain numbers (`histogram.py`). Every REPORT_INTERVAL_S a thread of the process hands
these to its Reporter (`reporter.py`), which gives them to Ray's agent of the node. `instruments.py` is the one table of
names; the documentation and the Grafana board are made from it. Nothing here is durable: counters begin at 0 with their
process, and Prometheus takes care of that.
"""
