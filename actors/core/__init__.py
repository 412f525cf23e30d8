"""What the actors decide, free of Ray: no clock, no sleep, no network. Time comes in as an argument."""
