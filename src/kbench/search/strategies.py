"""The search strategies of the package Kernel Tuner over a space of ours, with an objective of ours.

Of the package only the search space and the strategies are used. What it has for compiling and timing kernels is not:
a row is proved and timed by kbench, as every other one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from kbench.errors import CannotRunError, UsageError
from kbench.family import MAX_BLOCK

EXTRA = "tuner"
BRUTE_FORCE = "brute_force"

# Those of the package that look for the least of one number and need no further package.
STRATEGIES = (
    "adaptive_tabu_greywolf",
    "basinhopping",
    "bayes_opt",
    "diff_evo",
    "dual_annealing",
    "firefly_algorithm",
    "genetic_algorithm",
    "greedy_ils",
    "greedy_mls",
    "hybrid_vndx",
    "minimize",
    "mls",
    "ordered_greedy_mls",
    "pso",
    "random_sample",
    "simulated_annealing",
)

# Places that a strategy may ask for again before it gets to a new one. Those that never end by themselves come back
# to the same few once they have settled; a thousand answers from memory take milliseconds.
_REPEATS = 1000
# Strategies that settle on a place long before they had their rows (a genetic algorithm's population in a small space,
# descents) begin again elsewhere, until this many times one after the other brought nothing new.
_BARREN_STARTS = 5

Place = tuple[int, ...]
Objective = Callable[[Sequence[Place]], Sequence[float | None]]
"""Milliseconds of each place, in the order given; None where the row did not pass."""


def require_strategy(name: str) -> None:
    """Raise UsageError for a name that is no strategy, CannotRunError where the package is missing."""
    if name not in (BRUTE_FORCE, *STRATEGIES):
        known = ", ".join((BRUTE_FORCE, *STRATEGIES))
        raise UsageError(f"unknown strategy {name!r}", f"strategies: {known} (all but the first need kbench[{EXTRA}])")
    if name != BRUTE_FORCE and importlib.util.find_spec("kernel_tuner") is None:
        hint = f"pip install 'kbench[{EXTRA}]', or leave --strategy out: {BRUTE_FORCE} measures every row"
        raise CannotRunError(f"strategy {name} is Kernel Tuner's, and that package is not installed", hint)


def search(name: str, axes: Mapping[str, list[int]], budget: int, seed: int, objective: Objective) -> None:
    """Ask for the times of at most `budget` different places of the space, as the strategy wants them.

    axes: values by name, at least two on each. An exception of the objective ends the search, and comes out.
    Raises CannotRunError where the package is not as expected, or the strategy cannot do with this space.
    """
    try:
        from kernel_tuner.interface import Options, strategy_map
        from kernel_tuner.searchspace import Searchspace
        from kernel_tuner.util import RuntimeFailedConfig, StopCriterionReached, TuningBudget

        tune = strategy_map[name].tune  # loads its module, which may draw numbers: before they are seeded
    except (ImportError, KeyError) as error:
        what = f"strategy {name} cannot be used: {type(error).__name__}: {error}"
        raise CannotRunError(what, f"pip install --upgrade 'kbench[{EXTRA}]'") from error
    runner = _Runner(list(axes), budget, objective, RuntimeFailedConfig, StopCriterionReached)

    def start(space: Any) -> None:
        left = budget - runner.measured
        own = Options(max_fevals=left, **_hyperparameters(name, left))
        options = Options(
            strategy=name, strategy_options=own, max_fevals=left, budget=TuningBudget(max_fevals=left), seed=seed,
            tune_params=dict(axes), restrictions=[], objective=["time"], objective_higher_is_better=[False],
            metrics=None, cache={}, simulation_mode=False, verbose=False,
        )  # fmt: skip
        with contextlib.suppress(StopCriterionReached):
            tune(space, runner, options)

    with _seeded(seed), _silent():
        space = Searchspace(dict(axes), [], max_threads=MAX_BLOCK)
        starts = barren = 0
        try:
            while barren < _BARREN_STARTS and not runner.spent and runner.fault is None:
                known = runner.measured
                starts += 1
                start(space)
                barren = 0 if runner.measured > known else barren + 1
        except Exception as error:
            # Once the budget is spent a strategy may stumble over what it did not get; it has nothing more to tell. Nor
            # has one that did its work, and cannot begin again with the few rows that were left.
            if runner.fault is None and not runner.spent and starts == 1:
                what = f"strategy {name} fails in this space of {space.size} rows: {type(error).__name__}: {error}"
                raise CannotRunError(what, "choose another one") from error
    if runner.fault is not None:  # a strategy may have caught it
        raise runner.fault


def _hyperparameters(name: str, budget: int) -> dict[str, Any]:
    """What a strategy needs to be told. First samples that are spread out evenly come from a generator that nobody can
    seed, so these two have theirs from one of those that are seeded."""
    if name == "diff_evo":
        return {"constraint_aware": False}  # a space without constraints has none to be aware of
    if name == "bayes_opt":
        # Of the budget a third at most, so that the model has something to choose; 20 is what it takes by itself. Its
        # usual method looks at the clock to decide when to fit its model, which no seed fixes; this one always does.
        first = max(2, min(20, budget // 3))
        return {"samplingmethod": "random", "popsize": first, "method": "multi-fast"}
    return {}


class _Runner:
    """What strategies call to have places measured; it never measures one twice."""

    def __init__(
        self, names: Sequence[str], budget: int, objective: Objective, failed: Callable[[], Any], stop: type[Exception]
    ):
        self._names, self._budget, self._objective = names, budget, objective
        self._failed, self._stop = failed, stop
        self._known: dict[Place, float | None] = {}
        self._repeats = 0
        self.fault: BaseException | None = None

    @property
    def measured(self) -> int:
        return len(self._known)

    @property
    def spent(self) -> bool:
        return self.measured >= self._budget

    def run(self, places: Sequence[Sequence[int]], options: Any) -> list[dict[str, Any] | None]:
        """A result for each place; None for those that the budget does not allow any more."""
        if self.fault is not None:
            raise self._stop("the objective failed")
        wanted = [tuple(int(value) for value in place) for place in places]
        new = list(dict.fromkeys(place for place in wanted if place not in self._known))
        new = new[: self._budget - self.measured]
        if new:
            self._measure(new)
            options.budget.add_evaluations(len(new))
            self._repeats = 0
        else:
            self._repeats += len(wanted)
            if self._repeats > _REPEATS:
                raise self._stop("it comes back to what is known")
        return [self._result(place) if place in self._known else None for place in wanted]

    def _measure(self, places: Sequence[Place]) -> None:
        try:
            self._known.update(zip(places, self._objective(places), strict=True))
        except BaseException as error:
            self.fault = error
            raise

    def _result(self, place: Place) -> dict[str, Any]:
        result: dict[str, Any] = dict(zip(self._names, place, strict=True))
        time = self._known[place]
        return {**result, "__error__": self._failed()} if time is None else {**result, "time": time}

    # What else the package asks for; none of it is of use here.

    dev = SimpleNamespace(max_threads=MAX_BLOCK)

    def add_strategy_time(self, seconds: float) -> None: ...

    def shutdown(self) -> None: ...

    def available_parallelism(self) -> int:
        return 1


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The global generators, which are what strategies draw from, seeded; afterwards as they were."""
    kept, kept_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(kept)
        np.random.set_state(kept_numpy)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without what strategies print: stdout is a command's own. Warnings are about their models, not about rows."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
