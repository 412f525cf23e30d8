"""The ground of all pages of the console: calls of the backend, rendering, forms, changes and their audit."""
