"""The error tree of serving. What a server answers with is decided there; here stands whose fault an error is.

EngineError
├── RequestError (ValueError)       the caller's fault: this request is refused, nothing else is touched
│   ├── DuplicateRequestError           its id is in use
│   ├── InvalidParameterError           a value of the wrong type or out of its range
│   ├── InvalidPromptError              an empty prompt, or text or token ids that cannot be encoded or embedded
│   ├── PromptTooLongError              prompt and wanted tokens exceed what one request may hold
│   ├── UnknownParameterError (TypeError)   a keyword that no parameter has; in `sampling_params.py`
│   └── UnsupportedParameterError       a known setting or content kind that this engine does not offer
├── DeviceError                     a step lost the device state and it cannot be made again: the engine stops
├── StartupError (ValueError)       a config, file or combination of settings with which the engine cannot start
└── EngineStoppedError              the engine was shut down, or stopped by a fault; in `async_engine.py`
SettingError (ValueError)           a setting of the wrong type or value; in `config.py`, which knows nothing of ours
└── UnknownSettingError (TypeError)     a setting that there is none of
InvariantError (AssertionError)     our bug: the books contradict themselves, the engine stops

A step that fails on the device raises nothing else: its requests end with finish reason "error". A message states the
rule, the value received and the remedy. `UnsupportedKernelError` lives in `kernels/dispatch.py`, which knows nothing of
ours.
"""


class EngineError(Exception):
    """Base of every error that serving raises on purpose."""


class RequestError(EngineError, ValueError):
    """A request that cannot be served as it stands; the caller has to change it.

    Attributes:
        parameter: name of the field at fault, e.g. "temperature" or "messages[2].content"; None when none is to blame.
    """

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class DuplicateRequestError(RequestError):
    """A live request has the id already."""


class InvalidParameterError(RequestError):
    """A parameter has the wrong type or lies outside its range."""


class InvalidPromptError(RequestError):
    """The prompt is empty, cannot be encoded, or holds token ids outside the vocabulary."""


class PromptTooLongError(RequestError):
    """The prompt, or the prompt and the tokens asked for, can never fit; the message names the numbers."""


class UnsupportedParameterError(RequestError):
    """A known parameter, or kind of content, that this engine does not offer."""


class StartupError(EngineError, ValueError):
    """The engine cannot start with this model folder or these settings."""


class DeviceError(EngineError):
    """A step lost the device state, and there is no memory to make it again. No request has been told."""


class InvariantError(AssertionError):
    """The bookkeeping contradicts itself. A bug of this project: nothing catches it but the engine's own stop."""
