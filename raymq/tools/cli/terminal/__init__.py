"""The common parts of all `raymq` commands: their decorator, and their output as tables, JSON, errors, progress and
escaped text."""
