"""All rows of a run as one table: CSV, and Parquet where pyarrow is installed."""

from __future__ import annotations

import importlib.util
import io
from typing import TYPE_CHECKING

from kbench.errors import CannotRunError
from kbench.install import install_command
from kbench.results.facts import Card
from kbench.results.merge import parts
from kbench.results.rounds import merged
from kbench.results.store import Run
from kbench.results.tables import frame

if TYPE_CHECKING:
    import pandas as pd

EXTRA = "parquet"


def csv(run: Run) -> str:
    """One line an experiment, rounds together; columns as in the tables of a sweep, and the run and its start."""
    return _table(run).to_csv(index=False)


def parquet(run: Run) -> bytes:
    """The same with types. Raises CannotRunError without pyarrow."""
    require_parquet()
    buffer = io.BytesIO()
    # A column of objects has no type; its values have one.
    _table(run).convert_dtypes().to_parquet(buffer, index=False, engine="pyarrow")
    return buffer.getvalue()


def require_parquet() -> None:
    """Raises CannotRunError without the library that writes Parquet."""
    if importlib.util.find_spec("pyarrow") is None:
        raise CannotRunError("Parquet needs pyarrow, which is not installed", install_command(EXTRA))


def _table(run: Run) -> pd.DataFrame:
    import pandas as pd

    tables = []
    for part in parts(run):
        device = part.header.get("device")
        table = frame(merged(part.rows), Card.of(device if isinstance(device, dict) else {}))
        table.insert(0, "run", part.id)
        table.insert(1, "started", str(part.header.get("started", "")))
        tables.append(table)
    return pd.concat(tables, ignore_index=True) if len(tables) > 1 else tables[0]
