"""The device side of a step."""
