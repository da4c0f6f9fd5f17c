"""Serving: host bookkeeping, the device runner, text, and the ways in."""
