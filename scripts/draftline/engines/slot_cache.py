"""Attention caches of rows that come and go: transformers' `Cache` with layers that grow in place.

Shapes: B rows, G key-value heads, T columns, D head dimension.

All rows end at the same column and begin where they may, so a step writes one column for all of them, whatever their
lengths; an attention mask [B, T] tells which columns are a row's own. Positions are given to the model, so a column's number
means nothing. Rows are exchanged by `adopt` and chosen by `select`, and columns that no row needs are dropped. Layers may lie on
several devices; rows are named by indices on any.
"""

from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.configuration_utils import PretrainedConfig

from draftline.errors import DraftlineError

SPARE = 64
"""Columns that a buffer has to spare: it is copied once in so many steps."""


class GrowingLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values [B, G, T, D] of one attention layer, the last T columns written of a larger buffer.

    A sliding-window layer keeps all columns as well: transformers' mask hides those outside the window.
    """

    keys: Any
    values: Any

    def __init__(self, is_sliding: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = is_sliding
        self.first = self.end = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = key_states, value_states
        self.end = key_states.shape[2]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append columns and give all that are alive."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            return key_states, value_states
        new = key_states.shape[2]
        if self.end + new > self.keys.shape[2]:
            self._move(self.get_seq_length(), spare=max(SPARE, new))
        self.keys[:, :, self.end : self.end + new] = key_states
        self.values[:, :, self.end : self.end + new] = value_states
        self.end += new
        return self.keys[:, :, self.first : self.end], self.values[:, :, self.first : self.end]

    def adopt(self, rows: torch.Tensor, other: "GrowingLayer") -> None:
        """Put the rows of `other`, which has no more columns than this, into `rows`."""
        rows = rows.to(self.keys.device)
        columns = slice(self.end - other.get_seq_length(), self.end)
        self.keys[rows, :, columns] = other.keys[:, :, other.first : other.end]
        self.values[rows, :, columns] = other.values[:, :, other.first : other.end]

    def widen(self, columns: int) -> None:
        """Have at least `columns` columns alive, by empty ones on the left."""
        if self.end >= columns:
            self.first = min(self.first, self.end - columns)
        else:
            self._move(columns, spare=SPARE)

    def _move(self, columns: int, spare: int) -> None:
        """To a new buffer that begins with `columns` columns, the last of them those alive now."""
        live = self.get_seq_length()
        self.keys, self.values = (
            self._moved(buffer[:, :, self.first : self.end], columns - live, columns + spare)
            for buffer in (self.keys, self.values)
        )
        self.first, self.end = 0, columns

    @staticmethod
    def _moved(alive: torch.Tensor, at: int, capacity: int) -> torch.Tensor:
        batch, heads, columns, head_dim = alive.shape
        # Zeros, because a masked column counts nothing times what it holds.
        buffer = alive.new_zeros(batch, heads, capacity, head_dim)
        buffer[:, :, at : at + columns] = alive
        return buffer

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.keys, self.values = (
            buffer.index_select(0, beam_idx.to(buffer.device)) for buffer in (self.keys, self.values)
        )

    def get_seq_length(self) -> int:
        return self.end - self.first

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """The cache of a batch whose rows are exchanged. Attention layers share one count of columns."""

    def __init__(self, config: PretrainedConfig) -> None:
        """Empty, for a model of `config`. Raises DraftlineError for a kind of layer whose rows cannot be exchanged."""
        layers: list[Any] = []
        for layer in DynamicCache(config=config).layers:
            if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
                layers.append(GrowingLayer(is_sliding=type(layer) is DynamicSlidingWindowLayer))
            elif type(layer) is LinearAttentionLayer:
                layers.append(layer)
            else:
                raise DraftlineError(
                    f"config: completions.engine: transformers: cannot batch a model with {type(layer).__name__}s;"
                    " use another engine"
                )
        super().__init__(layers=layers)
        self.attention = [layer for layer in layers if isinstance(layer, GrowingLayer)]
        self.recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]

    @property
    def ignores_masked_columns(self) -> bool:
        """Whether a masked column between two tokens changes nothing: without a window, and without a running state."""
        return not self.recurrent and not any(layer.is_sliding for layer in self.attention)

    def select(self, rows: torch.Tensor) -> None:
        """Keep the given rows [N], in that order; a row may come several times."""
        self.reorder_cache(rows)  # type: ignore[arg-type]

    def adopt(self, rows: torch.Tensor, other: "RowCache") -> None:
        """Put all rows of `other`, which has no more columns, into the rows [N]."""
        for layer, source in zip(self.attention, other.attention):
            layer.adopt(rows, source)
        for mine, its in zip(self.recurrent, other.recurrent):
            for index in range(mine.number_of_states):
                for states, new in ((mine.conv_states, its.conv_states), (mine.recurrent_states, its.recurrent_states)):
                    state, rows_of_it = states[index], new[index]
                    if state is not None and rows_of_it is not None:
                        state[rows.to(state.device)] = rows_of_it

    def widen(self, columns: int) -> None:
        """Have at least `columns` columns alive, by empty ones on the left."""
        for layer in self.attention:
            layer.widen(columns)

    def drop(self, columns: int) -> None:
        """Let the first `columns` columns go."""
        for layer in self.attention:
            layer.first += columns
