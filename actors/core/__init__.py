"""The decisions of the actors, without Ray, clocks, sleeps or network calls. Functions get the current time as an
argument."""
