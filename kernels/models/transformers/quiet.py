"""Keeps transformers' advice out of our output."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_transformers(level: int) -> Iterator[None]:
    """Silence progress bars, warnings and log records below `level`, one of logging's. Not for concurrent use."""
    previous = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(level)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(previous)
