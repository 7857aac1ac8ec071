"""What an output must be, held where the comparison runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kbench.check.arrays import to_device, to_host
from kbench.check.bound import Tolerance, final_bound
from kbench.device.base import Device
from kbench.errors import KbenchError
from kbench.family import Array, Expected, Tensor

# Expected values stay on the device only while they take less than this share of what is free there; else they
# are uploaded part by part at each comparison.
_RESIDENT_SHARE = 0.25


class DeviceExpected:
    """Reference, bound and mask of one output, flat, readable part by part as arrays of `xp`.

    resident: copy all of it to the device at once; it is compared against many launches.
    """

    def __init__(self, tensor: Tensor, expected: Expected, xp: Any, resident: bool = True):
        self.tensor = tensor
        self.xp = xp
        place = (lambda array: to_device(array, xp)) if resident else (lambda array: array)
        self._value = place(expected.value.reshape(-1))
        bound: Any = expected.bound
        self._bound = float(bound) if np.ndim(bound) == 0 else place(bound.reshape(-1))
        self.unbounded = isinstance(self._bound, float) and self._bound == 0.0
        self.skip = unspecified_elements(tensor, xp)
        self.compared = tensor.count - (0 if self.skip is None else int(xp.count_nonzero(self.skip)))

    def part(self, part: slice, tolerance: Tolerance | None) -> tuple[Array, Array | float]:
        """Reference and final bound of the elements in `part`."""
        value = to_device(self._value[part], self.xp)
        bound = self._bound if isinstance(self._bound, float) else to_device(self._bound[part], self.xp)
        return value, final_bound(self.tensor, value, bound, self.xp, tolerance)

    def take(self, indices: Array, tolerance: Tolerance | None) -> tuple[Array, Array | float]:
        """Reference and final bound of single elements, by flat index (an array of `xp`)."""
        where = indices if isinstance(self._value, type(indices)) else to_host(indices)
        value = to_device(self._value[where], self.xp)
        bound = self._bound if isinstance(self._bound, float) else to_device(self._bound[where], self.xp)
        return value, final_bound(self.tensor, value, bound, self.xp, tolerance)


def unspecified_elements(tensor: Tensor, xp: Any) -> Array | None:
    """The mask of elements that may hold anything, flat; None if there are none."""
    if tensor.unspecified is None:
        return None
    mask = tensor.unspecified(xp)
    try:
        whole = xp.broadcast_to(mask, tensor.shape)
    except ValueError:
        whole = None
    if whole is None or mask.dtype != bool:
        raise KbenchError(
            f"tensor {tensor.name}: `unspecified` gives {mask.dtype} of shape {tuple(mask.shape)}, "
            f"not booleans that fit {tensor.shape}",
            "a fault of the family, not of a version",
        )
    return whole.reshape(-1)


class DeviceCase:
    """A case's inputs and expected outputs where a device's comparisons run: uploaded once, used by every
    version and block size. Make and use it inside `device.activate()`."""

    def __init__(
        self,
        device: Device,
        tensors: Mapping[str, Tensor],
        inputs: Mapping[str, Array],
        expected: Mapping[str, Expected],
    ):
        self._device = device
        self._tensors = tensors
        self._expected = expected
        self._placed: dict[str, DeviceExpected] = {}
        self._inputs = inputs
        self._pristine: dict[str, Array] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that inputs and masks take. Not the answers: copies of them are kept only where
        there is room to spare, and those that a GPU computed are the case's own."""
        if self._device.xp is np:
            return 0  # no copies
        masks = [placed.skip for placed in self._placed.values() if placed.skip is not None]
        return sum(int(array.nbytes) for array in (*self._pristine.values(), *masks))

    def pristine(self, name: str) -> Array:
        """An input's elements as flat words, never written to."""
        if name not in self._pristine:
            host = self._inputs[name]
            bits = host.view(f"u{host.dtype.itemsize}").reshape(-1)
            self._pristine[name] = to_device(bits, self._device.xp)
        return self._pristine[name]

    def expected(self, name: str) -> DeviceExpected:
        if name not in self._placed:
            tensor, expected = self._tensors[name], self._expected[name]
            nbytes = expected.value.nbytes + int(getattr(expected.bound, "nbytes", 8))
            on_host = self._device.xp is np
            resident = on_host or nbytes < _RESIDENT_SHARE * self._device.free_memory()
            self._placed[name] = DeviceExpected(tensor, expected, self._device.xp, resident)
        return self._placed[name]
