"""The decisions of the actors, without Ray: no clock, no sleep, no network. Times are arguments."""
