"""The common parts of all commands: their decorator, and output as tables, JSON, errors, progress and escaped
text."""
