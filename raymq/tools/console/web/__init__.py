"""The ground of all pages of the console: calls to the cluster, rendering, forms, changes and their audit."""
