"""The record from which a compiled step reads where everything is."""

import numpy as np

from kernels.models.step_layout import STEP


class StepFields:
    """One STEP. Its fields are set as an array's items: NumPy's own access by name takes several times as long."""

    def __init__(self) -> None:
        self._values = np.zeros(len(STEP.names or ()), np.int64)
        self._index = {name: index for index, name in enumerate(STEP.names or ())}
        self.address: int = self._values.ctypes.data

    def set(self, name: str, value: int) -> None:
        self._values[self._index[name]] = value
