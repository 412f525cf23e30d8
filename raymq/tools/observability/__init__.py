"""raymq in Prometheus and Grafana: the board, the alerts, and the objects that load them in Kubernetes.

Everything is made from raymq.telemetry.metrics.instruments or checked against it: an expression can name no series that
nobody reports. Only `ray_folder` needs Ray, which knows where Ray's Grafana looks for boards.
"""
