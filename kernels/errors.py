"""Errors of a model or its options. A broken invariant of the code is an AssertionError instead.

KernelsError
├── ModelNotFoundError   the operator's: nothing to load under that name or path
├── ModelFileError       the operator's: the files are damaged, incomplete or of a kind we cannot run
└── OptionsError         the operator's: options that contradict the model or the machine
"""


class KernelsError(Exception):
    """Says what was asked for, what was found and what would work; a retry changes nothing."""


class ModelNotFoundError(KernelsError):
    pass


class ModelFileError(KernelsError):
    pass


class OptionsError(KernelsError):
    pass
