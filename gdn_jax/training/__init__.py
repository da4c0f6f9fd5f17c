"""Training of small models: data, loss, optimiser."""
