"""Key-value cache of a changing batch: row = sequence, column = position, padded on the right.

Rows 0..n-1 are the running sequences, without holes, so that a step reads views and copies
nothing: a finished row is filled by the last one (`compact`). New rows are written behind the
others (`begin_prefill`), and a decode step writes one column per row (`begin_decode`). Columns
behind a row's length hold zeros or stale *finite* numbers; the caller masks them. The tensors are
inference tensors (made within a step), so whatever changes them does it in inference mode.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_MIN_ROWS = 8
_MIN_COLUMNS = 64


class SlotCache(Cache):
    """What a transformers model takes as its cache.

    Args:
        num_layers: Attention layers of the model.
        num_heads: Key-value heads per layer.
        head_dim: Width of a head.
        dtype: Of keys and values.
        device: Where they live.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._cursor = _Cursor()
        self._shape = (num_heads, head_dim)
        self._slots = [
            _SlotLayer(self._cursor, num_heads, head_dim, dtype, device) for _ in range(num_layers)
        ]
        super().__init__(layers=list(self._slots))
        self.num_rows = 0
        self.num_columns = 0
        self.cell_bytes = 2 * num_layers * num_heads * head_dim * dtype.itemsize

    def ensure(self, *, rows: int, columns: int) -> None:
        """Make room; what is stored stays. Grows by doubling, never shrinks."""
        if rows <= self.num_rows and columns <= self.num_columns:
            return
        while self.num_rows < rows:
            self.num_rows = max(2 * self.num_rows, _MIN_ROWS)
        while self.num_columns < columns:
            self.num_columns = max(2 * self.num_columns, _MIN_COLUMNS)
        for layer in self._slots:
            layer.resize(self.num_rows, self.num_columns)

    def begin_prefill(self, *, first_row: int, num_rows: int, num_columns: int) -> None:
        """The next forward writes whole prompts into `num_rows` rows from `first_row` on."""
        cursor = self._cursor
        cursor.prefill = True
        cursor.rows = slice(first_row, first_row + num_rows)
        cursor.columns = num_columns

    def begin_decode(self, *, row_index: Tensor, positions: Tensor, num_columns: int) -> None:
        """The next forward writes column `positions[i]` of row i and reads `num_columns` columns.

        Args:
            row_index: 0..n-1, shape (n,).
            positions: Column of each row, shape (n,).
            num_columns: Largest position + 1.
        """
        cursor = self._cursor
        cursor.prefill = False
        cursor.rows = slice(0, len(row_index))
        cursor.row_index = row_index
        cursor.positions = positions
        cursor.columns = num_columns

    @torch.inference_mode()
    def compact(self, *, sources: list[int], targets: list[int], num_columns: int) -> None:
        """Copy the first columns of rows `sources` into rows `targets`."""
        source, target = torch.tensor(sources), torch.tensor(targets)
        for layer in self._slots:
            layer.keys[target, :, :num_columns] = layer.keys[source, :, :num_columns]
            layer.values[target, :, :num_columns] = layer.values[source, :, :num_columns]

    @torch.inference_mode()
    def clear(self) -> None:
        """Forget everything: no number made under old weights stays (I11)."""
        for layer in self._slots:
            layer.keys.zero_()
            layer.values.zero_()

    @torch.inference_mode()
    def clear_row(self, row: int) -> None:
        """Forget a row that is not finite: NaN would reach others through their masked columns."""
        for layer in self._slots:
            layer.keys[row].zero_()
            layer.values[row].zero_()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that the next forward finds; only models that were given no mask ask."""
        del layer_idx
        return 0 if self._cursor.prefill else self._cursor.columns - 1


class _Cursor:
    """Where the forward pass that is under way writes and reads; shared by all layers."""

    __slots__ = ("columns", "positions", "prefill", "row_index", "rows")

    def __init__(self) -> None:
        self.prefill = True
        self.rows = slice(0, 0)
        self.columns = 0
        self.row_index = torch.empty(0, dtype=torch.long)
        self.positions = torch.empty(0, dtype=torch.long)


class _SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call] # its __init_subclass__
    """Keys and values of one attention layer, (rows, heads, columns, head_dim)."""

    is_sliding = False

    def __init__(
        self,
        cursor: _Cursor,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cursor = cursor
        self.keys: Tensor = torch.zeros(0, num_heads, 0, head_dim, dtype=dtype, device=device)
        self.values: Tensor = torch.zeros_like(self.keys)
        self.is_initialized = True

    def resize(self, rows: int, columns: int) -> None:
        self.keys = _grown(self.keys, rows, columns)
        self.values = _grown(self.values, rows, columns)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the cache was made with its shapes."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write what the forward pass made; return what it attends to."""
        cursor = self._cursor
        if cursor.prefill:
            self.keys[cursor.rows, :, : cursor.columns] = key_states
            self.values[cursor.rows, :, : cursor.columns] = value_states
            return key_states, value_states
        self.keys[cursor.row_index, :, cursor.positions] = key_states[:, :, 0]
        self.values[cursor.row_index, :, cursor.positions] = value_states[:, :, 0]
        rows, columns = cursor.rows, cursor.columns
        return self.keys[rows, :, :columns], self.values[rows, :, :columns]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys; only models that were given no mask ask."""
        return (query_length if self._cursor.prefill else self._cursor.columns), 0

    def get_seq_length(self) -> int:
        """Columns that the next forward finds."""
        return 0 if self._cursor.prefill else self._cursor.columns - 1

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1


def _grown(old: Tensor, rows: int, columns: int) -> Tensor:
    new = torch.zeros(rows, old.shape[1], columns, old.shape[3], dtype=old.dtype, device=old.device)
    new[: old.shape[0], :, : old.shape[2]] = old
    return new
