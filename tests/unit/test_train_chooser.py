"""The choice of versions: by times, by name, by what fits together, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from kbench.catalog import load_catalog
from kbench.errors import UsageError
from kbench.train.chooser import Answer, Chooser, Timed, Times, Wanted, parse_use, usual_block
from kbench.train.layout import Layout
from kbench.train.model import PRESETS, Model
from kbench.train.slots import Need, Shape, Slot, slots

CATALOG = load_catalog()
GPU = "Test GPU"
NANO = Shape(PRESETS["nano"], 4, 64, "bf16")
ODD = Shape(Model(1, 3, 33, vocab=300, context=17), 1, 17, "bf16")


def slot_of(name: str, shape: Shape = NANO) -> Slot:
    return next(slot for slot in slots(shape, Layout(shape.model).count) if slot.name == name)


def needs_of(shape: Shape) -> dict[str, Need]:
    """By role."""
    found = slots(shape, Layout(shape.model).count)
    return {need.role: need for slot in found for way in slot.ways for need in way.needs}


def source(family: str, number: int) -> str:
    """Stands for the fingerprint of a version's files."""
    return f"files of {family} {number}"


def times_of(measured: Mapping[str, Mapping[int, float]], shape: Shape = NANO, block: int = 128) -> Times:
    """best.json with these milliseconds, by role and version."""
    families: dict[str, Any] = {}
    for role, versions in measured.items():
        need = needs_of(shape)[role]
        entry = families.setdefault(need.family, {}).setdefault(need.dtype, {}).setdefault("cold", {})
        entry[need.problem] = {
            str(number): {
                "row": {"block": block, "measurement": {"median_ms": ms}, "source": source(need.family, number)}
            }
            for number, ms in versions.items()
        }
    return Times({"gpus": {GPU: families}}, GPU, source)


def chooser(use: str = "best", times: Times | None = None, deterministic: bool = False) -> Chooser:
    return Chooser(CATALOG, parse_use(use, CATALOG), times, deterministic)


def shown(answer: Answer) -> tuple[str, ...]:
    return (answer.way.name, *(f"{c.need.family}:{c.version.number}" for c in answer.candidates))


def first(slot: Slot, use: str = "best", times: Times | None = None, deterministic: bool = False) -> tuple[str, ...]:
    return shown(chooser(use, times, deterministic).answers(slot)[0])


# ---------------------------------------------------------------------------------------------- by times


def test_the_fastest_that_was_measured_wins_with_its_block_size() -> None:
    times = times_of({"encoder": {1: 3.0, 2: 1.0, 3: 2.0}})
    answers = chooser(times=times).answers(slot_of("encoder"))
    assert [shown(answer)[1] for answer in answers] == ["encoder_forward:2"]
    assert answers[0].candidates[0].block == 128 and answers[0].cost == 1.0
    assert chooser().answers(slot_of("encoder"))[0].candidates[0].block == 256, "what was not measured"


def test_what_was_not_measured_loses_against_anything_that_was() -> None:
    assert first(slot_of("encoder"), times=times_of({"encoder": {1: 1e9}}))[1] == "encoder_forward:1"


def test_times_are_of_the_very_problem_dtype_and_gpu() -> None:
    measured = {"encoder": {1: 1.0}}
    for shape in (replace(NANO, batch=5), replace(NANO, dtype="fp32")):
        assert times_of(measured).of(needs_of(shape)["encoder"]) == {}
    need = needs_of(NANO)["encoder"]
    assert times_of(measured).of(need) == {1: Timed(128, {}, 1.0)}
    assert Times({"gpus": {GPU: {}}}, "another", source).of(need) == {} == Times({}, GPU, source).of(need)


def test_times_of_files_that_changed_since_are_none() -> None:
    need = needs_of(NANO)["layernorm"]
    document = {
        "gpus": {GPU: {need.family: {need.dtype: {"cold": {need.problem: {
            "1": {"row": {"block": 32, "measurement": {"median_ms": 1.0}, "source": source(need.family, 1)}},
            "2": {"row": {"block": 32, "measurement": {"median_ms": 1.0}, "source": "other files"}},
            "3": {"row": {"block": 32, "measurement": {"median_ms": 1.0}}},
        }}}}}}
    }  # fmt: skip
    assert Times(document, GPU, source).of(need) == {1: Timed(32, {}, 1.0)}


@pytest.mark.parametrize(
    ("fused", "residual", "norm", "way"), [(1.0, 0.3, 0.6, "apart"), (1.0, 0.5, 0.6, "fused"), (1.0, 0.5, 0.5, "fused")]
)
def test_a_fused_family_competes_with_the_sum_of_its_parts(
    fused: float, residual: float, norm: float, way: str
) -> None:
    times = times_of({"fused_residual": {4: fused}, "residual": {2: residual}, "residual_layernorm": {5: norm}})
    answer = chooser(times=times).answers(slot_of("residual+layernorm"))[0]
    assert answer.way.name == way
    assert answer.cost == pytest.approx(4 * (fused if way == "fused" else residual + norm)), "two layers, twice each"


def test_a_part_that_was_not_measured_makes_a_way_unknown() -> None:
    times = times_of({"fused_residual": {4: 99.0}, "residual": {2: 0.1}})
    assert first(slot_of("residual+layernorm"), times=times) == ("fused", "fused_residual_forward:4")


def test_without_times_the_highest_numbers_and_fused_ways_stand_for_the_fastest() -> None:
    assert first(slot_of("residual+layernorm")) == ("fused", "fused_residual_forward:6")
    assert first(slot_of("fc+gelu")) == ("epilogue", "matmul_forward:5")
    assert first(slot_of("classifier")) == ("fused", "classifier_fused:6")
    assert first(slot_of("attention"))[1:] == ("attention_forward:6", "attention_backward:9")


# ---------------------------------------------------------------------------------------------- pairs


def fits(answer: Answer) -> bool:
    forward, backward = (candidate.version for candidate in answer.candidates)
    return set(backward.needs) <= set(forward.saves)


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("timed", [False, True])
def test_pairs_that_do_not_fit_are_never_chosen_and_all_that_fit_are_there(dtype: str, timed: bool) -> None:
    shape = replace(NANO, dtype=dtype)
    slot = slot_of("attention", shape)
    times = times_of({}, shape) if timed else None
    answers = chooser(times=times).answers(slot)
    assert all(map(fits, answers))
    one, other = slot.ways[0].needs
    every = itertools.product(chooser(times=times).eligible(one), chooser(times=times).eligible(other))
    assert len(answers) == sum(set(b.needs) <= set(f.saves) for f, b in every) > 0


def test_a_fast_version_alone_does_not_win_where_its_partner_is_slow() -> None:
    """Version 2 saves the log-sum-exp, which only the backward version 10 reads."""
    slot = slot_of("attention")
    forward = {2: 0.1, 5: 1.0, 6: 0.9, 10: 0.2}
    times = times_of({"attention_forward": forward, "attention_backward": {8: 1.0, 9: 1.5, 10: 2.0}})
    # 2 and 10: 2.1; 5 and 8: 2.0; 6 and 9: 2.4. The backward version 8 reads qkvr, which 6 does not leave.
    assert first(slot, times=times) == ("attention", "attention_forward:5", "attention_backward:8")
    times = times_of({"attention_forward": forward, "attention_backward": {8: 1.0, 9: 1.05, 10: 1.8}})
    assert first(slot, times=times) == ("attention", "attention_forward:2", "attention_backward:10")


def test_only_what_the_partner_reads_is_kept() -> None:
    answers = {shown(answer)[1:]: answer.saved for answer in chooser(times=times_of({})).answers(slot_of("attention"))}
    assert answers["attention_forward:5", "attention_backward:9"] == ("att",)
    assert answers["attention_forward:5", "attention_backward:8"] == ("qkvr", "att")
    assert answers["attention_forward:10", "attention_backward:10"] == ("lse",)
    assert chooser().answers(slot_of("encoder"))[0].saved == ()


def test_versions_named_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(UsageError, match="no choice of versions covers attention; the versions named do not fit"):
        chooser("attention_forward=6,attention_backward=8").answers(slot_of("attention"))
    with pytest.raises(UsageError, match="covers attention; .*must save"):
        chooser("attention_forward=2").answers(slot_of("attention"))  # its partner needs a GPU
    assert first(slot_of("attention"), "attention_forward=2", times_of({}))[1:] == (
        "attention_forward:2", "attention_backward:10",
    )  # fmt: skip


def test_alternatives_were_all_measured_and_fit() -> None:
    times = times_of({"attention_forward": {5: 1.0, 6: 1.0}, "attention_backward": {8: 1.0, 9: 1.0}})
    found = {shown(answer)[1:] for answer in chooser(times=times).alternatives(slot_of("attention"))}
    assert found == {(f"attention_forward:{f}", f"attention_backward:{b}") for f, b in ((5, 8), (5, 9), (6, 9))}


# ---------------------------------------------------------------------------------------------- by name


def test_naive_takes_the_plainest_way_and_the_lowest_numbers() -> None:
    fast = times_of({"fused_residual": {4: 0.1}, "residual": {1: 9.0, 2: 1.0}, "residual_layernorm": {1: 9.0, 5: 1.0}})
    for times in (None, fast):
        naive = Chooser(CATALOG, Wanted("naive"), times)
        for slot in slots(NANO, Layout(NANO.model).count):
            answer = naive.answers(slot)[0]
            assert answer.way is slot.ways[0]
            if slot.name == "attention":
                # The lowest sum of two that fit: the forward version 1 leaves nothing for the backward version 1.
                assert shown(answer)[1:] == ("attention_forward:3", "attention_backward:1")
            else:
                for candidate in answer.candidates:
                    assert candidate.version is naive.eligible(candidate.need)[0], candidate.need.role


@pytest.mark.parametrize(
    ("use", "slot", "way"),
    [
        ("fused_residual_forward=2", "residual+layernorm", "fused"),
        ("residual_forward=1", "residual+layernorm", "apart"),
        ("layernorm_forward=3", "residual+layernorm", "apart"),
        ("gelu_forward=1", "fc+gelu", "apart"),
        ("gelu_backward=2", "fcproj+gelu backward", "apart"),
        ("softmax_forward=4", "classifier", "apart"),
        ("classifier_fused=3", "classifier", "fused"),
        ("naive,classifier_fused=3", "classifier", "fused"),
        # Both ways multiply: GELU alone says which.
        ("matmul_forward=3,gelu_forward=1", "fc+gelu", "apart"),
        ("matmul_backward=1,gelu_backward=2", "fcproj+gelu backward", "apart"),
    ],
)
def test_a_version_that_is_named_forces_its_way_whatever_is_faster(use: str, slot: str, way: str) -> None:
    for answers in (chooser(use).answers(slot_of(slot)), chooser(use, _faster(slot, way)).answers(slot_of(slot))):
        assert {answer.way.name for answer in answers} == {way}
        for name, number in parse_use(use, CATALOG).fixed.items():
            found = [c.version.number for c in answers[0].candidates if c.need.family == name]
            assert found == [number]


def _faster(slot: str, way: str) -> Times:
    """Times by which every other way than this one is faster, with all versions measured."""
    measured = {}
    for each in slot_of(slot).ways:
        for need in each.needs:
            ms = 9.0 if each.name == way else 0.1
            measured[need.role] = {version.number: ms for version in chooser().eligible(need)}
    return times_of(measured)


def test_a_family_of_all_ways_says_nothing_about_the_way() -> None:
    both = chooser("matmul_backward=1", times_of({})).answers(slot_of("fcproj+gelu backward"))
    assert {answer.way.name for answer in both} == {"apart", "epilogue"}
    fixed = chooser("matmul_forward=2").answers(slot_of("fcproj"))
    assert shown(fixed[0]) == ("only", "matmul_forward:2")


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("slot", ["qkv", "attention"])
def test_tf32_is_never_silent(slot: str) -> None:
    """Versions without a GEMM do not claim TF32."""
    found = chooser(times=times_of({}, replace(NANO, dtype="tf32"))).answers(slot_of(slot, replace(NANO, dtype="tf32")))
    for answer in found:
        assert all("tf32" in c.version.dtypes and c.need.dtype == "tf32" for c in answer.candidates)
    with pytest.raises(UsageError, match="version 1: dtype tf32 is not supported; it has fp32, bf16, fp16"):
        chooser("matmul_forward=1").answers(slot_of("qkv", replace(NANO, dtype="tf32")))


def test_sizes_that_a_version_does_not_take_are_refused_by_their_rule() -> None:
    with pytest.raises(UsageError) as caught:
        chooser("matmul_backward=2").answers(slot_of("qkv backward", ODD))
    assert caught.value.message == "no choice of versions covers qkv backward"
    assert "version 2" in caught.value.hint and "needs" in caught.value.hint and "here B=1" in caught.value.hint
    assert first(slot_of("fcproj+gelu backward", ODD))[1] == "matmul_backward:1", "132 is not divisible by 8"
    assert first(slot_of("attention", ODD), times=times_of({}, ODD))[2] == "attention_backward:9", "nor is a head"


def test_every_slot_of_an_odd_model_has_an_answer() -> None:
    for recompute, micro_steps, dtype in itertools.product((0, 2), (1, 2), ("fp32", "tf32", "bf16")):
        shape = replace(ODD, recompute=recompute, micro_steps=micro_steps, dtype=dtype)
        for use in ("best", "naive"):
            for slot in slots(shape, Layout(shape.model).count):
                assert chooser(use).answers(slot), slot.name


def test_a_version_that_only_a_gpu_runs_is_not_chosen_without_times() -> None:
    numbers = [v.number for v in chooser().eligible(needs_of(NANO)["attention_forward"])]
    assert 10 not in numbers and 6 in numbers
    assert 10 in [v.number for v in chooser(times=times_of({})).eligible(needs_of(NANO)["attention_forward"])]
    with pytest.raises(UsageError, match="version 10 needs a GPU: it is cuDNN's attention"):
        chooser("attention_forward=10").answers(slot_of("attention"))


def test_what_works_in_place_has_to_say_so() -> None:
    """A need whose input and output share memory, of a family of which no version allows it."""
    need = replace(needs_of(NANO)["gelu_backward"], alias=("inp", "dinp"))
    assert chooser().eligible(need) == []
    slot = slot_of("fcproj+gelu backward")
    slot = replace(slot, ways=(replace(slot.ways[0], needs=(slot.ways[0].needs[0], need)),))
    with pytest.raises(UsageError, match="gelu_backward: version 1 does not work in place; version 2 does not work"):
        chooser().answers(slot)


def test_what_the_backward_pass_reads_has_to_be_saved() -> None:
    assert [v.number for v in chooser().eligible(needs_of(NANO)["fc_gelu"])] == [5], "the others lose GELU's input"


def test_adamw_of_a_training_step_is_one_that_trains() -> None:
    with pytest.raises(UsageError, match="adamw: version 1: needs"):
        chooser("adamw=1").answers(slot_of("adamw"))


def test_deterministic_leaves_out_what_adds_in_any_order() -> None:
    assert first(slot_of("encoder backward"), "naive") == ("only", "encoder_backward:1")
    assert first(slot_of("encoder backward"), "naive", deterministic=True) == ("only", "encoder_backward:2")
    with pytest.raises(UsageError, match="encoder_backward: version 1 is not deterministic"):
        chooser("encoder_backward=1", deterministic=True).answers(slot_of("encoder backward"))
    for slot in slots(NANO, Layout(NANO.model).count):
        answer = chooser(deterministic=True, times=times_of({})).answers(slot)[0]
        assert all(c.version.claims_deterministic for c in answer.candidates), slot.name


# ---------------------------------------------------------------------------------------------- --use


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("best", Wanted("best")),
        ("naive", Wanted("naive")),
        ("gelu_forward=2", Wanted("best", {"gelu_forward": 2})),
        (" naive , gelu_forward=2,adamw=3 ", Wanted("naive", {"gelu_forward": 2, "adamw": 3})),
        ("gelu_forward=2,naive", Wanted("naive", {"gelu_forward": 2})),
        ("gelu_forward=2,gelu_forward=2", Wanted("best", {"gelu_forward": 2})),
    ],
)
def test_use_is_read(text: str, right: Wanted) -> None:
    assert parse_use(text, CATALOG) == right


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "'' is none of best, naive, FAMILY=VERSION"),
        ("fastest", "'fastest' is none of"),
        ("best,,naive", "none of"),
        ("best,naive", "it is either best or naive"),
        ("gelu_forward", "'gelu_forward' is none of"),
        ("gelu_forward=", "'gelu_forward=' is none of"),
        ("gelu_forward=two", "'gelu_forward=two' is none of"),
        ("gelu_forward=-1", "'gelu_forward=-1' is none of"),
        ("gelu_forward=1.0", "none of"),
        ("gelu_forward=99", "gelu_forward has no version 99; it has 1, 2"),
        ("gelu_froward=1", "unknown family 'gelu_froward'; did you mean gelu_forward?"),
        ("=1", "unknown family ''"),
        ("best=1", "unknown family 'best'"),
        ("gelu_forward=1,gelu_forward=2", "gelu_forward is named twice"),
        ("gelu_forward=²", "none of"),
    ],
)
def test_use_that_cannot_be_read_says_which_part(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_use(text, CATALOG)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_usual_block_size_is_the_one_next_to_256() -> None:
    version = CATALOG["gelu_forward"].by_number[1]
    assert usual_block(version.blocks) == 256
    assert usual_block(replace(version, block_sizes=(32, 64)).blocks) == 64
    assert usual_block(replace(version, block_sizes=(512, 1024)).blocks) == 512
    assert usual_block(replace(version, fixed=96).blocks) == 96
