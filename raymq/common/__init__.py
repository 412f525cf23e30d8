"""Messages, names, errors, settings and the values on the wire, which every other wing imports. No calls to actors."""
