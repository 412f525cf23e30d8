"""The console's pages: a module per noun, each with its `ROUTES`."""
