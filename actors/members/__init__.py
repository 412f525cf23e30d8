"""The methods of the Broker actor that pass queries (Question) to clients."""
