"""From a shape to a program: recompute by what memory is there, what fits instead, and `--use` that nothing runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest

from check_fakes import FakeDevice
from kbench.catalog import load_catalog
from kbench.errors import CannotRunError, UsageError
from kbench.train import setup
from kbench.train.chooser import Chooser, Times, parse_use
from kbench.train.engine import RESERVE
from kbench.train.model import PRESETS
from kbench.train.program import Use
from kbench.train.setup import Chosen, Kernels, Workshop
from kbench.train.slots import Need, Shape

CATALOG = load_catalog()
D12 = Shape(PRESETS["d12"], 8, 1024, "bf16")


class NoTrials:
    """Nothing is swept and nothing proven; uses are noted."""

    proven: list[Use]

    def __init__(self, *args: Any):
        NoTrials.proven = []

    def missing(self, *args: Any) -> Sequence[Need]:
        return []

    def prove(self, uses: Sequence[Use]) -> None:
        NoTrials.proven = list(uses)

    def close(self) -> None:
        pass


class Card(FakeDevice):
    """A GPU with this many free bytes, on which nothing runs."""

    row_name = "Test GPU"

    def __init__(self, free: int, kind: str = "emulator"):
        super().__init__(free=free)
        self.kind = kind


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(setup, "Trials", NoTrials)

    def chosen(
        free: int = 1 << 40, shape: Shape = D12, use: str = "best", recompute: int | None = None,
        times: Times | None = None,
    ) -> Chosen:  # fmt: skip
        workshop = Workshop(
            Card(free, "emulator" if times is None else "cuda"), CATALOG, tmp_path, cast(Any, None), cast(Any, None),
            cast(Any, None), lambda names: nullcontext(lambda: None),
        )  # fmt: skip
        if times is not None:
            monkeypatch.setattr(workshop, "times", lambda: times)
        return workshop.choose(shape, parse_use(use, CATALOG), recompute)

    return chosen


def needed(chosen: Chosen) -> int:
    return sum(tensor.nbytes for tensor in chosen.program.tensors)


# ---------------------------------------------------------------------------------------------- memory


def test_recompute_is_the_least_that_memory_allows(choose: Any) -> None:
    sizes = [needed(choose(recompute=level)) for level in range(3)]
    assert sizes[0] > sizes[1] > sizes[2]
    assert choose().shape.recompute == 0
    for level in range(3):
        assert choose(sizes[level] + RESERVE).shape.recompute == level
        # A byte less, and it takes one level more: what the driver allocates by itself stays free.
        if level < 2:
            assert choose(sizes[level] + RESERVE - 1).shape.recompute == level + 1


def test_what_does_not_fit_says_what_does(choose: Any) -> None:
    least = needed(choose(recompute=2))
    free = least + RESERVE - 1
    with pytest.raises(CannotRunError) as caught:
        choose(free)
    assert f"with batch 8 and sequences of 1024 needs {least / 1e9:.1f} GB" in caught.value.message
    assert caught.value.hint == "--batch 4 fits"
    assert choose(free, Shape(PRESETS["d12"], 4, 1024, "bf16")).shape.batch == 4
    with pytest.raises(CannotRunError, match="not even a batch of 1 fits: choose a smaller --model or a shorter --seq"):
        choose(RESERVE + 1000)
    with pytest.raises(CannotRunError, match="not even"):
        choose(0)


def test_a_level_that_was_asked_for_is_taken_or_refused(choose: Any) -> None:
    size = needed(choose(recompute=0))
    assert choose(size + RESERVE, recompute=2).shape.recompute == 2
    with pytest.raises(CannotRunError, match="--batch 4 fits"):
        choose(size + RESERVE - 1, recompute=0)


def _row(ms: float) -> dict[str, Any]:
    return {"block": 128, "measurement": {"median_ms": ms}, "source": ""}


def test_where_memory_is_short_attention_without_its_matrix_is_taken_before_anything_is_recomputed(choose: Any) -> None:
    """By times the matrix wins: here it is faster."""
    attention = {"attention_forward": {6: 1.0, 10: 5.0}, "attention_backward": {9: 1.0, 10: 5.0}}
    problem = "B=8 T=1024 C=768 NH=12"
    families = {
        name: {"bf16": {"cold": {problem: {str(n): {"row": _row(ms)} for n, ms in versions.items()}}}}
        for name, versions in attention.items()
    }
    times = Times({"gpus": {"Test GPU": families}}, "Test GPU", lambda family, number: "")
    rich = choose(times=times)
    assert rich.picks["attention_forward"].version == 6 and rich.picks["attention_backward"].version == 9
    short = choose(needed(rich) + RESERVE - 1, times=times)
    assert short.picks["attention_forward"].version == 10 and short.shape.recompute == 0
    assert needed(short) < needed(rich)


# ---------------------------------------------------------------------------------------------- uses


def test_everything_that_runs_is_proven_before(choose: Any) -> None:
    chosen = choose(shape=Shape(PRESETS["nano"], 2, 16, "fp32", 2))
    uses = [action.use for action in chosen.program.actions if hasattr(action, "use")]
    assert set(NoTrials.proven) == set(uses)
    # Gradients are written in the first micro-step and added to in the second: both are proven.
    flags = {dict(use.sizes).get("accumulate") for use in NoTrials.proven if use.family == "matmul_backward"}
    assert flags == {0, 1}


@pytest.mark.parametrize(
    ("use", "words"),
    [
        ("trimat_forward=1", "trimat_forward=1: no part of this step is of that family; they are adamw, attention"),
        ("permute=1", "--use permute=1: no part"),
        ("softmax_forward=2", "--use softmax_forward=2: no part"),  # rows of d12 have padding
        ("residual_forward=1,fused_residual_forward=2", "--use residual_forward=1: no part"),  # one or the other
    ],
)
def test_a_version_that_was_named_and_that_nothing_would_run_is_an_error(use: str, words: str, choose: Any) -> None:
    with pytest.raises(UsageError) as caught:
        choose(use=use)
    assert words in str(caught.value)


def test_a_family_that_no_step_has_is_an_error_before_anything_is_swept(
    choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sweep(*args: Any) -> None:
        raise AssertionError("minutes of sweeping for nothing")

    monkeypatch.setattr(NoTrials, "missing", sweep)
    with pytest.raises(UsageError, match="permute=1: no part of this step"):
        choose(use="permute=1", times=Times({}, "", lambda family, number: ""))


def test_named_versions_run(choose: Any) -> None:
    chosen = choose(use="naive,layernorm_forward=5,matmul_forward=3,gelu_forward=1")
    roles = chosen.picks
    assert {roles[role].version for role in ("layernorm", "residual_layernorm")} == {5}
    assert {roles[role].version for role in ("qkv", "attproj", "fc", "fcproj", "logits")} == {3}
    assert roles["gelu"].version == 1 and roles["encoder"].version == 1


def test_nano_may_take_the_classifier_apart(choose: Any) -> None:
    chosen = choose(shape=Shape(PRESETS["nano"], 4, 64, "fp32"), use="softmax_forward=2")
    assert chosen.picks["softmax"].version == 2 and "classifier" not in chosen.picks


def test_every_pick_is_of_a_version_that_is_there(choose: Any) -> None:
    chosen = choose()
    for role, pick in chosen.picks.items():
        assert pick.block in CATALOG.version(pick.need.family, pick.version).blocks, role
    chooser = Chooser(CATALOG, parse_use("best", CATALOG), None)
    assert all(c.version in chooser.eligible(c.need) for answer in chosen.answers for c in answer.candidates)


# ---------------------------------------------------------------------------------------------- of a checkpoint

KEPT = {"kernels": {"encoder": ["encoder_forward", 3, 256]}, "recompute": 1}


def test_the_kernels_of_a_checkpoint() -> None:
    assert Kernels.from_document(KEPT) == Kernels({"encoder": ("encoder_forward", 3, 256, {})}, 1)
    for damaged in (
        {}, {**KEPT, "kernels": None}, {**KEPT, "kernels": {"encoder": "encoder_forward:3 block 256"}},
        {**KEPT, "kernels": {"encoder": ["encoder_forward", "third", 256]}}, {**KEPT, "recompute": None},
        {"kernels": KEPT["kernels"]},
    ):  # fmt: skip
        assert Kernels.from_document(damaged) is None, damaged
