"""The Grafana dashboard, the alerts, and the Kubernetes objects that load them.

All PromQL expressions are generated from raymq.telemetry.metrics.instruments or tested against it, so they name only
series that raymq reports. Only `ray_folder` needs Ray.
"""
