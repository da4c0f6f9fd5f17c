"""Errors of the model package; each ends a load and leaves nothing behind.

ModelError (ValueError)
├── ConfigError             config.json is missing, unreadable or contradicts itself
│   └── UnsupportedModelError   a known setting or family that is not supported, by name
├── WeightsError            a tensor is missing, spare, misshapen, or a file is damaged
└── TokensError             token ids that the model has no embedding for
"""


class ModelError(ValueError):
    """Base of the errors of the model package."""


class ConfigError(ModelError):
    """The model's config is missing, unreadable or contradicts itself."""


class UnsupportedModelError(ConfigError):
    """The config asks for something this project does not run; the message names it and what is supported."""


class WeightsError(ModelError):
    """A weight file is damaged, or its tensors are not the model's."""


class TokensError(ModelError):
    """Token ids out of the vocabulary's range, or none at all."""
