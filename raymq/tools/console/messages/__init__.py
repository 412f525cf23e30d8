"""The logic of the console's message pages: displaying bodies, parsing searches, and sharing live tails between
browsers."""
