"""`kbench sweep --strategy`: its options, and what is said of its searches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from kbench.cli.screen import Screen
from kbench.errors import UsageError

if TYPE_CHECKING:
    from kbench.search.run import Search, Searched

_MOST_ROWS = 1_000_000  # more is a slip: it would take days


def _max_rows(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 20 or not 1 <= int(text) <= _MOST_ROWS:
        raise UsageError(f"--max-rows {text!r} is not a whole number in range", "give a number of rows, such as 40")
    return int(text)


def _complete_strategy(incomplete: str) -> list[str]:
    from kbench.search.strategies import BRUTE_FORCE, STRATEGIES

    return [name for name in (BRUTE_FORCE, *STRATEGIES) if name.startswith(incomplete)]


StrategyOption = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="NAME",
        help="Search for the fastest row, such as by genetic_algorithm. brute_force, all rows, if left out.",
        autocompletion=_complete_strategy,
    ),
]
MaxRowsOption = Annotated[
    int | None,
    typer.Option(
        "--max-rows",
        metavar="N",
        parser=_max_rows,
        help="Rows that --strategy may measure of each version and problem. A quarter, 32 at least, if left out.",
    ),
]


def chosen_search(strategy: str | None, max_rows: int | None) -> Search | None:
    """The search that was asked for; None where all rows are to be measured. Raises UsageError, CannotRunError."""
    from kbench.search.run import Search
    from kbench.search.strategies import BRUTE_FORCE

    searches = strategy is not None and strategy != BRUTE_FORCE
    if max_rows is not None and not searches:
        raise UsageError("--max-rows is for a search", "name one with --strategy, such as random_sample")
    return Search(strategy, max_rows) if searches and strategy is not None else None


def show_searched(found: Sequence[Searched], screen: Screen) -> None:
    """How much of each space was measured."""
    for each in found:
        how = (
            f"{each.strategy} measured {each.rows} of {each.size} rows"
            if each.rows < each.size
            else (f"all {each.size} rows were measured: no more than a search may")
        )
        screen.prose(f"{each.space}: {how}", "search:  ")
