"""The order in which queries are taken: shuffled passes, and a cursor that is exact.

Group k of a batch takes the query k places behind the batch's cursor, replacements included. So the
cursor to commit follows from the number of admitted groups alone, and a restart neither skips a
query nor takes one twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from flexmarl.core.seeds import derive


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """An exact position: the next row to take.

    Attributes:
        epoch: Pass over the dataset, from 0.
        position: Place within the pass, below the number of rows.
    """

    epoch: int = 0
    position: int = 0


class DatasetOrder:
    """Which row stands at which place of which pass; a function of seed and size alone.

    Args:
        num_rows: Rows.
        seed: Of the run.
        shuffle: Whether each pass has an order of its own.
        epochs: Passes; None: as many as are asked for.
    """

    def __init__(
        self, num_rows: int, *, seed: int, shuffle: bool, epochs: int | None = None
    ) -> None:
        if num_rows < 1:
            raise ValueError("a dataset needs at least one row")
        self.num_rows = num_rows
        self._epochs = epochs
        self._seed = seed
        self._shuffle = shuffle
        self._pass: tuple[int, list[int]] | None = None

    def row_at(self, cursor: Cursor) -> int:
        """Index of the row at a cursor."""
        return self._rows(cursor.epoch)[cursor.position]

    def left(self, cursor: Cursor) -> int | None:
        """Rows from a cursor to the end of the last pass; None: there is none."""
        if self._epochs is None:
            return None
        return max(self._epochs * self.num_rows - cursor.epoch * self.num_rows - cursor.position, 0)

    def advance(self, cursor: Cursor, count: int) -> Cursor:
        """The cursor `count` places on."""
        passes, position = divmod(cursor.position + count, self.num_rows)
        return Cursor(cursor.epoch + passes, position)

    def take(self, cursor: Cursor, count: int) -> tuple[tuple[int, ...], Cursor]:
        """The next `count` row indices and the cursor behind them."""
        rows = tuple(self.row_at(self.advance(cursor, place)) for place in range(count))
        return rows, self.advance(cursor, count)

    def _rows(self, epoch: int) -> list[int]:
        if self._pass is None or self._pass[0] != epoch:
            rows = list(range(self.num_rows))
            if self._shuffle:
                Random(derive(self._seed, "epoch", epoch)).shuffle(rows)  # noqa: S311
            self._pass = (epoch, rows)
        return self._pass[1]
