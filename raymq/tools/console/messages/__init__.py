"""Decisions of the console's pages about messages: how bodies are shown, searches are read, and tails are shared."""
