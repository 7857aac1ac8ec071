"""The needs of a training step: which families, how often, at which sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kbench.catalog import load_catalog
from kbench.family import Problem
from kbench.train.layout import Layout
from kbench.train.model import PRESETS, Model
from kbench.train.slots import Need, Shape, Slot, slots

D12 = Shape(PRESETS["d12"], 4, 1024, "bf16")
BTC = {"B": 4, "T": 1024, "C": 768}


def slots_of(shape: Shape) -> dict[str, Slot]:
    found = slots(shape, Layout(shape.model).count)
    assert len({slot.name for slot in found}) == len(found)
    return {slot.name: slot for slot in found}


def needs_of(shape: Shape) -> dict[str, Need]:
    """By role, of all ways."""
    return {need.role: need for slot in slots_of(shape).values() for way in slot.ways for need in way.needs}


def linear(C: int, OC: int, gelu: int = 0, bias: int = 1) -> dict[str, int]:
    return {**BTC, "C": C, "OC": OC, "gelu": gelu, "bias": bias}


def linear_backward(C: int, OC: int, gelu: int = 0, bias: int = 1) -> dict[str, int]:
    return {**BTC, "C": C, "OC": OC, "accumulate": 0, "gelu": gelu, "bias": bias}


# Of d12, B = 4, T = 1024: 768 channels, 12 layers and heads, 50,257 tokens padded to 50,304. The number of parameters
# is GPT-2's 124,439,808, and 47 rows of padding; no part of a tensor needs any.
RIGHT: dict[str, tuple[str, int, dict[str, int]]] = {
    "encoder": ("encoder_forward", 1, {**BTC, "V": 50304}),
    "layernorm": ("layernorm_forward", 1, BTC),
    "qkv": ("matmul_forward", 12, linear(768, 2304)),
    "attention_forward": ("attention_forward", 12, {**BTC, "NH": 12}),
    "attention_backward": ("attention_backward", 12, {**BTC, "NH": 12}),
    "attproj": ("matmul_forward", 12, linear(768, 768)),
    "residual": ("residual_forward", 24, {"N": 3145728}),
    "residual_layernorm": ("layernorm_forward", 24, BTC),
    "fused_residual": ("fused_residual_forward", 24, BTC),
    "fc": ("matmul_forward", 12, linear(768, 3072)),
    "gelu": ("gelu_forward", 12, {"N": 12582912}),
    "fc_gelu": ("matmul_forward", 12, linear(768, 3072, gelu=1)),
    "fcproj": ("matmul_forward", 12, linear(3072, 768)),
    "logits": ("matmul_forward", 1, linear(768, 50304, bias=0)),
    "classifier": ("classifier_fused", 1, {"B": 4, "T": 1024, "V": 50257, "P": 50304}),
    "logits_backward": ("matmul_backward", 1, linear_backward(768, 50304, bias=0)),
    "layernorm_backward": ("layernorm_backward", 25, {**BTC, "accumulate": 0}),
    "fcproj_backward": ("matmul_backward", 12, linear_backward(3072, 768)),
    "gelu_backward": ("gelu_backward", 12, {"N": 12582912}),
    "fcproj_gelu_backward": ("matmul_backward", 12, linear_backward(3072, 768, gelu=1)),
    "fc_backward": ("matmul_backward", 12, linear_backward(768, 3072)),
    "attproj_backward": ("matmul_backward", 12, linear_backward(768, 768)),
    "qkv_backward": ("matmul_backward", 12, linear_backward(768, 2304)),
    "encoder_backward": ("encoder_backward", 1, {**BTC, "V": 50304, "accumulate": 1}),
    "gelu_again": ("gelu_forward", 12, {"N": 12582912}),
    "global_norm": ("global_norm", 1, {"N": 124439808 + 47 * 768}),
    "step_control": ("step_control", 1, {"N": 4096, "S": 1024, "W": 128}),
    "adamw": ("adamw", 1, {"N": 124439808 + 47 * 768, "training": 1}),
}


def test_d12_needs_these_families_so_often_at_these_sizes() -> None:
    found = {role: (need.family, need.times, dict(need.sizes)) for role, need in needs_of(D12).items()}
    assert found == RIGHT


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16"])
def test_only_multiplications_know_tf32(dtype: str) -> None:
    for need in needs_of(replace(D12, dtype=dtype)).values():
        multiplies = need.family.startswith(("matmul_", "attention_"))
        expected = dtype if multiplies else "fp32" if dtype == "tf32" or need.family == "step_control" else dtype
        assert need.dtype == expected, need.role


@pytest.mark.parametrize("model", [PRESETS["d12"], PRESETS["nano"], Model(1, 3, 33, vocab=300, context=17)])
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("recompute", [0, 1, 2])
def test_every_need_is_a_problem_of_its_family(model: Model, micro_steps: int, recompute: int) -> None:
    catalog = load_catalog()
    for need in needs_of(Shape(model, 2, 16, "fp32", micro_steps, recompute)).values():
        family = catalog[need.family]
        assert list(need.sizes) == list(family.sizes), f"{need.role}: best.json names problems in the family's order"
        assert any(not family.refusal(v, Problem(need.sizes, need.dtype), v.blocks[0]) for v in family.versions)


def test_recompute_adds_what_is_computed_again() -> None:
    none, gelu, norms = (needs_of(replace(D12, recompute=level)) for level in range(3))
    assert set(gelu) - set(none) == {"gelu_again"} == set(norms) - set(none)
    assert none["layernorm"].times == gelu["layernorm"].times == 1 and norms["layernorm"].times == 25


def test_micro_steps_add_a_sum_of_losses() -> None:
    several = needs_of(replace(D12, micro_steps=3))
    assert set(several) - set(needs_of(D12)) == {"loss_sum"}
    need = several["loss_sum"]
    assert (need.family, dict(need.sizes), need.dtype) == ("residual_forward", {"N": 4096}, "fp32")
    assert need.alias == ("inp1", "out"), "it adds in place"


def test_the_classifier_comes_apart_only_where_rows_have_no_padding() -> None:
    assert [way.name for way in slots_of(D12)["classifier"].ways] == ["fused"]
    nano = slots_of(Shape(PRESETS["nano"], 4, 64, "fp32"))["classifier"]
    assert [way.families for way in nano.ways] == [
        ("softmax_forward", "crossentropy_forward", "crossentropy_softmax_backward"), ("classifier_fused",),
    ]  # fmt: skip
    assert dict(nano.ways[0].needs[0].sizes) == {"N": 256, "C": 256}


def test_only_attention_is_a_pair_and_only_three_work_in_place() -> None:
    pairs = [way for slot in slots_of(D12).values() for way in slot.ways if way.pair]
    assert [way.families for way in pairs] == [("attention_forward", "attention_backward")]
    in_place = {role: need.alias for role, need in needs_of(D12).items() if need.alias is not None}
    assert in_place == {"gelu_backward": ("dout", "dinp"), "classifier": ("logits", "dlogits")}
    assert {role: need.saves for role, need in needs_of(D12).items() if need.saves} == {"fc_gelu": ("pre",)}


def test_parameter_gradients_are_written_first_and_added_to_later() -> None:
    flags = {role: need.sizes["accumulate"] for role, need in needs_of(D12).items() if "accumulate" in need.sizes}
    assert flags.pop("encoder_backward") == 1, "dwte holds the classifier's part already"
    assert set(flags) == {role for role in RIGHT if role.endswith("_backward") and role[:3] in
                          ("log", "lay", "fcp", "fc_", "att", "qkv") and role != "attention_backward"}  # fmt: skip
    assert set(flags.values()) == {0}


@pytest.mark.parametrize(("steps", "rows"), [(1, 1024), (1024, 1024), (1025, 2048), (19560, 32768)])
def test_runs_of_many_lengths_are_one_problem(steps: int, rows: int) -> None:
    assert needs_of(replace(D12, steps=steps))["step_control"].sizes["S"] == rows
