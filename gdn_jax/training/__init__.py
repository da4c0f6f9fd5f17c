"""Training a small model: everything around the loss. Needs the extra `train`; nothing of the engine imports it."""
