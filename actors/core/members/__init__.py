"""The broker's decisions about queries (Question) that clients must answer."""
