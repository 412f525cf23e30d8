"""Metrics of raymq in Ray's Prometheus pipeline.

Stores, decision code (cores) and clients count in plain Python numbers (`histogram.py`). Every REPORT_INTERVAL_S a
thread of the process passes the counts to the process's Reporter (`reporter.py`). The Reporter passes them to the
node's Ray agent. `instruments.py` is the only table of metrics; the documentation and the Grafana dashboard are
generated from it. Metrics are not durable: counters start at 0 with their process, and Prometheus' `rate` handles such
resets.
"""
