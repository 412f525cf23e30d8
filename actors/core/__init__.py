"""The decisions of the actors, free of Ray: no clock, no sleep, no network. Time comes in as an argument."""
