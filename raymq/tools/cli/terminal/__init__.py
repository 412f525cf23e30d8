"""The frame of all commands: their decorator, and output as tables, JSON, errors, progress and safe texts."""
