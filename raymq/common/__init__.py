"""Messages, names, errors, settings and wire formats, which every other package of raymq imports. This package calls no
actors."""
