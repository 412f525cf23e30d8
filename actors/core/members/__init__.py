"""The broker's decisions about questions to clients."""
