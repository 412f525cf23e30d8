"""Code that all pages of the console share: calls to the cluster, rendering, forms, changes and their audit."""
