"""Kernel arguments are typed by the compiled kernel; what does not fit is refused by name before launch."""

import pytest

from kbench.device.arguments import parse_signature, typed_arguments
from kbench.errors import LaunchRefused
from kbench.family import Ref, Tensor, normal

TENSORS = (
    Tensor("x", (4,), "fp32", "in", draw=normal(0, 1)),
    Tensor("y", (4,), "fp32", "out"),
    Tensor("h", (4,), "bf16", "out"),
)


def typed(signature, *args):
    values = typed_arguments("k", parse_signature(signature), args, TENSORS, lambda ref: 1000 + 4 * ref.offset)
    return [value.value for value in values]


def test_values_and_pointers():
    assert typed("&f*f i f", "x", Ref("y", 2), 7, 0.1) == [1000, 1008, 7, pytest.approx(0.1, rel=1e-7)]


def test_an_int_reaches_a_float_parameter_as_a_float():
    assert typed(" f", 3) == [3.0]


@pytest.mark.parametrize(
    "signature, value", [(" i", 2**31), (" i", -(2**31) - 1), (" u", -1), (" y", 256), (" s", 40000)]
)
def test_numbers_that_do_not_fit_are_refused(signature, value):
    with pytest.raises(LaunchRefused, match=f"argument 1 of kernel k: {value} does not fit"):
        typed(signature, value)


def test_large_numbers_fit_64_bits():
    assert typed(" l", 2**31) == [2**31]


@pytest.mark.parametrize(
    "signature, args, words",
    [
        (" i", (0.5,), "passes the float 0.5"),
        ("*f", (3,), "passes the number 3"),
        (" f", ("x",), "passes the tensor x"),
        ("*f", ("h",), "tensor h holds bf16"),
        ("*b", ("x",), "tensor x holds fp32"),
        ("*f", ("z",), "no tensor 'z'"),
        ("*f", (Ref("x", 4),), "offset 4 is outside tensor x of 4"),
        ("*f*f", ("x",), "takes 2 arguments (float*, float*), the plan passes 1"),
        (" x", (1,), "which a plan cannot fill"),
    ],
)
def test_refusals_name_the_argument(signature, args, words):
    with pytest.raises(LaunchRefused) as refused:
        typed(signature, *args)
    assert words in str(refused.value)
