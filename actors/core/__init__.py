"""The decisions of the actors, without Ray, clocks, sleeps or network calls. Times are arguments."""
