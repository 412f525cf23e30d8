"""Programs for operators: the command line, the console, the doctor, Grafana's board, and Kubernetes' manifests."""
