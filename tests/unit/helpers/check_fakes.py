"""A device in numpy whose kernels are Python functions, and a small family, for the tests of the check."""

from __future__ import annotations

import numpy as np

from kbench.device.base import Bound, Buffer, Damage, Device, Prepared
from kbench.device.dtypes import numpy_dtype
from kbench.family import (
    Expected,
    Family,
    Launch,
    Problem,
    Props,
    Ref,
    Tensor,
    Version,
    integers,
    normal,
)

ZONE = 64  # bytes of redzone on each side
PATTERN = 0xAB


class FakeDevice(Device):
    """`module` given to prepare: kernel name to `function(schedule, *arguments)`; tensors come as arrays that
    begin one redzone early, so that a test can write outside: element i stands at [i + ZONE // itemsize]."""

    kind = "emulator"
    xp = np

    def __init__(self, schedules=("forward", "reverse"), free=1 << 40):
        self.schedules = schedules
        self.free_bytes = free
        self.live = 0
        self.props = Props("fake", "sm_90", 3, 2048, 1024, 49152, 232448, 233472, 65536, 1 << 20, 1 << 40)

    def describe(self):
        return {"name": "fake"}

    def build(self, source, kernels, arch=""):
        raise AssertionError("the fake device runs Python functions: nothing is compiled for it")

    def free_memory(self):
        return self.free_bytes

    def alloc(self, tensor):
        self.live += 1
        raw = np.full(tensor.nbytes + 2 * ZONE, PATTERN, np.uint8)
        array = raw[ZONE : ZONE + tensor.nbytes].view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)
        return Buffer(tensor, array, raw.ctypes.data + ZONE, raw)

    def free(self, buffer):
        self.live -= 1

    def upload(self, buffer, values):
        buffer.array[...] = values

    def download(self, buffer):
        return buffer.array.copy()

    def poison(self, buffer, byte):
        buffer.array.view(f"u{buffer.array.itemsize}")[...] = int.from_bytes(bytes([byte]) * buffer.array.itemsize)

    def damage(self, buffer):
        raw = buffer.handle
        outside = np.ones(raw.size, bool)
        outside[ZONE : ZONE + buffer.tensor.nbytes] = False
        spoiled = np.flatnonzero(outside & (raw != PATTERN))
        if spoiled.size == 0:
            return None
        raw[spoiled] = PATTERN
        return Damage(buffer.tensor.name, int(spoiled[0]) - ZONE, int(spoiled.size))

    def prepare(self, plan, module, tensors):
        return Prepared(tuple(plan), (), tuple(tensors), native=module)

    def bind(self, prepared, buffers):
        return Bound(prepared, dict(buffers))

    def enqueue(self, bound, stream=None, schedule=""):
        for step in bound.prepared.plan:
            assert isinstance(step, Launch)
            arguments = [self._argument(bound.native, argument) for argument in step.args]
            bound.prepared.native[step.kernel](schedule, *arguments)

    def _argument(self, buffers, argument):
        if isinstance(argument, str | Ref):
            buffer = buffers[argument if isinstance(argument, str) else argument.tensor]
            return buffer.handle[: buffer.handle.size // 8 * 8].view(numpy_dtype(buffer.tensor.dtype))
        return argument

    def synchronize(self):
        pass

    def close(self):
        pass


OUTSIDE = ZONE // 4  # where element 0 of a four-byte tensor stands in what a kernel gets


def inside(array, count):
    """The elements themselves of what a kernel gets."""
    return array[OUTSIDE : OUTSIDE + count]


COUNT = 300


def doubling_family(plan, **more):
    """out = 2 * inp, ids = tags, and a running `state` += inp; COUNT elements each. One version with this plan."""

    def tensors(problem):
        shape = (problem["N"],)
        return (
            Tensor("inp", shape, "fp32", "in", ("n",), normal(0.5, 1.0)),
            Tensor("tags", shape, "int32", "in", ("n",), integers(0, 1000)),
            Tensor("state", shape, "fp32", "inout", ("n",), normal(0.0, 1.0)),
            Tensor("out", shape, "fp32", "out", ("n",)),
            Tensor("ids", shape, "int32", "out", ("n",), exact=True),
            Tensor("extra", shape, "fp32", "out", ("n",), intermediate=True),
        )

    def reference(problem, inputs, error, xp):
        return {
            "out": Expected(2.0 * inputs["inp"]),
            "ids": Expected(inputs["tags"]),
            "state": Expected(inputs["state"] + inputs["inp"]),
            "extra": Expected(0.5 * inputs["inp"]),
        }

    return Family(
        name="doubling", summary="", sizes={"N": "elements"}, dtypes=("fp32",),
        presets={"default": {"N": COUNT}, "small": {"N": COUNT}}, check_shapes=(),
        tensors=tensors, reference=reference,
        versions=(Version(1, "", lambda problem, block, props: plan, ("fp32",), **more),),
    )  # fmt: skip


PLAN = (Launch("double", (3,), (128,), ("out", "ids", "state", "inp", "tags")),)
PROBLEM = Problem({"N": COUNT}, "fp32")


def double(schedule, out, ids, state, inp, tags):
    """The right kernel."""
    inside(out, COUNT)[:] = 2 * inside(inp, COUNT)
    inside(ids, COUNT)[:] = inside(tags, COUNT)
    inside(state, COUNT)[:] += inside(inp, COUNT)
