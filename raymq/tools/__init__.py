"""Programs for operators: the command line, the web console, the doctor, the Grafana dashboard, and the Kubernetes
manifests."""
