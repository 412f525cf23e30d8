"""Messages, names, errors, settings and wire formats. Every other package of raymq imports this package. It calls no
actors."""
