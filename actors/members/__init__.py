"""The methods of the Broker actor that carry questions to clients."""
