"""The voice of all commands on the terminal: tables, JSON, errors, progress, and texts made safe to print."""
