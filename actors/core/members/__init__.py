"""Questions to clients: what a broker decides about them."""
