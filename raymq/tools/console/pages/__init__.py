"""The web console's pages: one module per noun, each with its `ROUTES`."""
