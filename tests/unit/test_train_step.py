"""The step as a program, built without a device: what memory it takes, and that its calls fit together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from check_fakes import FakeDevice
from kbench.catalog import load_catalog
from kbench.errors import KbenchError
from kbench.family import ITEM_SIZES, Copy, Fill, Tensor
from kbench.train.engine import Plans
from kbench.train.layout import Layout
from kbench.train.model import PRESETS, Model
from kbench.train.program import Action, Call, Plain, Program, Use
from kbench.train.slots import Shape
from kbench.train.step import build
from train_runs import picks_with

ODD = Model(2, 3, 33, vocab=300, context=17)
FUSED = {"residual+layernorm": "fused", "fc+gelu": "epilogue", "fcproj+gelu backward": "epilogue"}
EPILOGUES = {"fc_gelu": 5, "fcproj_gelu_backward": 2}
# Attention by its matrix, and by log-sum-exp.
MATRIX = {"attention_forward": 6, "attention_backward": 9}
STATISTICS = {"attention_forward": 10, "attention_backward": 10}


def plans() -> Plans:
    """Of a device that only has properties."""
    return Plans(load_catalog(), cast(Any, SimpleNamespace(props=FakeDevice().props)))


def program_of(shape: Shape, versions: dict[str, int], ways: dict[str, str]) -> tuple[Program, Plans]:
    made = plans()
    picks = picks_with(shape, {"adamw": 3, **versions}, ways)
    return build(shape, picks, made.touches), made


def kinds(shape: Shape) -> Iterator[tuple[Program, Plans]]:
    """The step made of plain parts, and of fused ones."""
    multiplied = {"matmul_forward": 2, "attention_forward": 3}  # in TF32, too
    yield program_of(shape, multiplied, {})
    # Epilogues want whole packets, and that of the forward pass refuses fp32.
    epilogues = shape.model.channels % 8 == 0 and shape.dtype != "fp32"
    ways = {slot: way for slot, way in FUSED.items() if way == "fused" or epilogues}
    yield program_of(shape, {**multiplied, **EPILOGUES, **MATRIX}, {**ways, "classifier": "fused"})


# ---------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(("attention", "most"), [(STATISTICS, 24.5e9), (MATRIX, 44e9)], ids=["log-sum-exp", "matrix"])
def test_d12_with_64_sequences_stays_within_its_memory(attention: dict[str, int], most: float) -> None:
    shape = Shape(PRESETS["d12"], 64, 1024, "bf16", recompute=1, steps=50)
    program, _ = program_of(shape, {**EPILOGUES, **attention}, FUSED)
    needed = sum(tensor.nbytes for tensor in program.tensors)
    assert needed <= most
    # What it has to hold at least: parameters and gradients, m, v and master weights; 12 C of each token and layer. A
    # tensor left out would show.
    parameters = shape.model.parameter_count * (2 + 2 + 4 + 4 + 4)
    activations = 64 * 1024 * 2 * 12 * (3 + 1 + 1 + 1 + 1 + 1 + 4) * 768
    assert needed >= parameters + activations


def test_the_attention_matrix_is_what_log_sum_exp_saves() -> None:
    shape = Shape(PRESETS["d12"], 64, 1024, "bf16", recompute=1)
    matrix, statistics = (
        {t.name: t.nbytes for t in program_of(shape, EPILOGUES | versions, FUSED)[0].tensors}
        for versions in (MATRIX, STATISTICS)
    )
    assert set(matrix) - set(statistics) == {f"att.{layer}" for layer in range(12)}
    assert set(statistics) - set(matrix) == {f"lse.{layer}" for layer in range(12)}
    assert matrix["att.0"] == 64 * 12 * 1024 * 1024 * 2 and statistics["lse.0"] == 64 * 12 * 1024 * 4


def test_each_recompute_level_takes_less() -> None:
    shape = Shape(PRESETS["d12"], 4, 1024, "bf16")
    sizes = [
        sum(t.nbytes for t in program_of(replace(shape, recompute=level), EPILOGUES | STATISTICS, FUSED)[0].tensors)
        for level in range(3)
    ]
    # Level 1 keeps one GELU output instead of 12, level 2 one LayerNorm output instead of 24.
    token = 4 * 1024 * 768 * 2
    assert sizes[0] - sizes[1] == 11 * 4 * token and sizes[1] - sizes[2] == 23 * token


def test_fp32_has_no_master_weights_and_bf16_has() -> None:
    for dtype, expected in (("fp32", False), ("tf32", False), ("bf16", True)):
        versions = {"matmul_forward": 2, "attention_forward": 3}
        program, _ = program_of(Shape(PRESETS["nano"], 1, 8, dtype), versions, {})
        assert any(tensor.name == "master" for tensor in program.tensors) == expected


# ---------------------------------------------------------------------------------------------- wiring

SHAPES = [
    Shape(PRESETS["nano"], 4, 64, "fp32", 1, 0),
    Shape(PRESETS["nano"], 4, 64, "tf32", 1, 1),
    Shape(PRESETS["nano"], 2, 64, "bf16", 2, 2),
    Shape(ODD, 1, 1, "fp32", 2, 1),
    Shape(ODD, 3, 17, "bf16", 1, 2),
    Shape(PRESETS["nano"], 4, 64, "fp32", 2, 1, memory=60 * 256 * 64),  # logits in four parts
]
IDS = [f"{s.dtype}-C{s.model.channels}-{s.batch}x{s.seq}x{s.micro_steps}-r{s.recompute}-{s.parts}" for s in SHAPES]


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_every_view_is_of_a_tensor_of_its_dtype_and_reaches_no_further(shape: Shape) -> None:
    for program, made in kinds(shape):
        tensors = {tensor.name: tensor for tensor in program.tensors}
        assert len(tensors) == len(program.tensors), "two tensors of one name"
        for call in _calls(program.actions):
            for tensor in made.of(call.use).touched:
                view = call.views.get(tensor.name)
                if view is None:
                    continue
                whole = tensors[view.tensor]
                assert whole.dtype == tensor.dtype, f"{call.role}: {tensor.name}"
                assert view.offset + tensor.count <= whole.count, f"{call.role}: {tensor.name}"
                aligned = view.offset * ITEM_SIZES[whole.dtype] % 256 == 0
                assert aligned or view.tensor not in ("params", "grads"), f"{call.role}: {tensor.name} is not aligned"


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_nothing_is_read_before_it_is_written(shape: Shape) -> None:
    """And what a transient tensor lies in holds nothing that is still to be read."""
    for program, made in kinds(shape):
        step = (*program.forward, *program.first)
        if shape.micro_steps > 1:
            step += (*program.forward, *program.later)
        written = {"params", "m", "v", "master", "decays", "inputs", "targets", "dlosses", "schedule", "settings",
                   "step", "window", "filled"}  # fmt: skip
        for action in (*step, *program.update):
            for name, fresh in _touched(action, made):
                assert fresh or name in written, f"{action.role} reads {name}"
            written |= {name for name, fresh in _touched(action, made) if fresh}
            if isinstance(action, Call) and _transient(action, made):
                written.discard(action.arena)


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_every_gradient_is_written_once_by_the_first_micro_step_and_added_to_by_later_ones(shape: Shape) -> None:
    for program, made in kinds(shape):
        flags = _accumulating(program.first, made)
        parts = {part.offset: (part.parameter.name, part.layer) for part in Layout(shape.model).parts}
        assert set(flags) == set(parts), "every part gets a gradient"
        for offset, values in flags.items():
            # The embedding's: the classifier writes, the encoder adds; of positions: a fill, then the encoder adds.
            right = {"wte": [0] + [1] * shape.parts, "wpe": [1]}.get(parts[offset][0], [0])
            assert values == right, parts[offset]
        if shape.micro_steps > 1:
            later = _accumulating(program.later, made)
            assert set(later) == set(parts) and {v for values in later.values() for v in values} == {1}
            assert not any(action.role == "dwpe" for action in program.later), "positions keep their gradients"
        fills = [action for action in program.first if action.role == "dwpe"]
        assert len(fills) == 1
        fill = cast(Fill, cast(Plain, fills[0]).steps[0])
        assert fill.count == shape.model.context * shape.model.channels


def test_the_step_runs_as_often_as_the_needs_say() -> None:
    """Times are what the chooser multiplies with."""
    for recompute in range(3):
        shape = Shape(PRESETS["d6"], 2, 32, "fp32", 2, recompute)
        picks = picks_with(shape, {"adamw": 3, **EPILOGUES, **MATRIX}, FUSED)
        program = build(shape, picks, plans().touches)
        for role, pick in picks.items():
            counted = sum(action.role == role for action in (*program.forward, *program.first))
            once = {"global_norm", "step_control", "adamw", "loss_sum"}
            if role not in once:
                assert counted == pick.need.times, f"{role} at recompute {recompute}"
            elif role != "loss_sum":
                assert sum(action.role == role for action in program.update) == 1


def test_a_use_that_its_family_refuses_has_no_plan() -> None:
    use = Use("attention_backward", 10, 128, (("B", 1), ("T", 1), ("C", 64), ("NH", 4)), "bf16")
    with pytest.raises(KbenchError, match="attention_backward version 10 cannot be used: needs T of at least 2"):
        plans().of(use)


# ---------------------------------------------------------------------------------------------- inside


def _calls(actions: tuple[Action, ...]) -> list[Call]:
    return [action for action in actions if isinstance(action, Call)]


def _role(tensor: Tensor, call: Call) -> str:
    """`in`, `out` or `inout`, with the flag `accumulate`, which makes outputs inputs too."""
    accumulates = dict(call.use.sizes).get("accumulate") == 1 and tensor.name in ("dweight", "dbias", "dwte", "dwpe")
    return "inout" if accumulates else tensor.role


def _touched(action: Action, made: Plans) -> list[tuple[str, bool]]:
    """The step's tensors that an action touches, in an order in which what is read comes first; whether it only
    writes."""
    if isinstance(action, Plain):
        found = []
        for step in action.steps:
            if isinstance(step, Copy):
                found.append((step.source.tensor, False))
            assert isinstance(step, Copy | Fill)
            found.append((step.target.tensor, True))
        return found
    placed = [tensor for tensor in made.of(action.use).touched if tensor.name in action.views]
    roles = [(action.views[tensor.name].tensor, _role(tensor, action)) for tensor in placed]
    reads = [(name, False) for name, role in roles if role in ("in", "inout")]
    return reads + [(name, True) for name, role in roles if role != "in"]


def _transient(call: Call, made: Plans) -> int:
    return sum(tensor.nbytes for tensor in made.of(call.use).transient(call.views))


def _accumulating(actions: tuple[Action, ...], made: Plans) -> dict[int, list[int]]:
    """The flags of all calls that write a part of the gradients, by its offset."""
    found: dict[int, list[int]] = {}
    for call in _calls(actions):
        touched = {tensor.name for tensor in made.of(call.use).touched}
        for name, view in call.views.items():
            if view.tensor == "grads" and name in touched:
                found.setdefault(view.offset, []).append(dict(call.use.sizes)["accumulate"])
    return found


@pytest.mark.parametrize("versions", [MATRIX, STATISTICS], ids=["matrix", "log-sum-exp"])
def test_the_backward_pass_of_attention_reads_what_the_forward_pass_of_its_layer_left(versions: dict[str, int]) -> None:
    """Not all versions read all of it, so that no run on the emulator would tell."""
    shape = Shape(Model(3, 2, 128, vocab=256, context=64), 2, 64, "bf16", recompute=1)
    program, _ = program_of(shape, {**EPILOGUES, **versions}, FUSED)
    calls = {role: [call for call in program.actions if isinstance(call, Call) and call.role == role] for role in
             ("attention_forward", "attention_backward")}  # fmt: skip
    forward, backward = calls["attention_forward"][:3], calls["attention_backward"][:3][::-1]
    assert len({one.views["out"] for one in forward}) == 3
    for one, other in zip(forward, backward, strict=True):
        assert other.views["out"] == one.views["out"] and other.views["inp"] == one.views["inp"]
        for name in {"qkvr", "att", "lse"} & set(one.views):
            assert other.views[name] == one.views[name]
