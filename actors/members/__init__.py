"""The methods of the Broker actor by which questions travel to clients."""
