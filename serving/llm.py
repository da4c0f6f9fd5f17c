"""LLM: the Python API. Shaped so that a vLLM script ports by changing its import.

This is the composition root of a process without a server: it reads the config, plans the memory, loads weights, and
builds scheduler, runner and engine. Everything it says at start-up says what was chosen and why.
"""

import logging

_LOG = logging.getLogger(__name__)
