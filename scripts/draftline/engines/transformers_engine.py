"""Engine `transformers`: the target inside the job, on the CPU or one GPU, with rows that join and leave a running batch.

Shapes: B slots (rows in flight), N new rows, T columns of the cache, V vocabulary.

Prompts enter in groups of about equal length. What many of them begin with (a system prompt, the words of a task) is run once.
A step feeds every slot one token. A row that ends frees its slot for the next prompt; with no prompt left, the batch shrinks.
"""

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch.nn.functional import pad

from draftline.cpu_linear import pack
from draftline.engines import Request, Result, Sampling
from draftline.engines.sampler import draw
from draftline.engines.slot_cache import RowCache
from draftline.errors import DraftlineError
from draftline.loading import load_model
from draftline.manifest import Manifest

PREFILL_TOKENS = {"cpu": 512, "cuda": 16384}
"""Tokens of a group of prompts that enters together; a single prompt may be longer."""
SHARED = 8
"""A beginning that so many prompts have in common is run once for them all."""
REFILL_SHARE = 1 / 16
"""Slots are filled when so many are free: a group costs a run through the model's weights."""
SHRINK_SHARE = 3 / 4
"""With no prompt left, the batch is cut to its living rows once they fill no more than this."""


@dataclass
class Row:
    """A request: `context` are all ids it begins with, the first `shared` in common with others; `ids` are sampled now."""

    request: Request
    context: list[int]
    shared: int = 0
    ids: list[int] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """How many tokens were sampled for the prompt, in earlier jobs too."""
        return len(self.request.sampled_ids) + len(self.ids)


class TransformersEngine:
    """Engine on a causal language model of transformers. `in_flight` is the number of rows in a batch."""

    def __init__(self, manifest: Manifest, run: Mapping[str, Any], in_flight: int) -> None:
        self.manifest, self.loading, self.device, self.in_flight = manifest, run, run["device"], in_flight

    def __enter__(self) -> Self:
        self._model: Any = pack(load_model(self.manifest, self.loading))
        return self

    def __exit__(self, *exception: object) -> None:
        del self._model

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[Request, Result]]:
        """Each request with its result, as rows end. Raises DraftlineError when the rows do not fit in memory."""
        try:
            yield from Batch(self._model, requests, sampling, self.in_flight, set(self.manifest.eos_token_ids)).run()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            raise DraftlineError(
                f"config: run.completions.batch: {self.in_flight}: so many rows do not fit in the memory of {self.device};"
                " lower it"
            ) from None


class Batch:
    """The rows in flight, and the queue behind them."""

    def __init__(
        self, model: Any, requests: Sequence[Request], sampling: Sampling, slots: int, stop_ids: set[int]
    ) -> None:
        self.model, self.sampling, self.stop_ids = model, sampling, stop_ids
        self.device = model.device
        rows = [Row(request, [*request.prompt_ids, *request.sampled_ids]) for request in requests]
        _mark_shared(rows)
        rows.sort(key=lambda row: (row.context[: row.shared], -len(row.context), row.request.id))
        self.queue = deque(rows)
        self.slots: list[Row | None] = [None] * min(slots, len(rows))
        self.tokens = [0] * len(self.slots)
        self.cache = RowCache(model.config)
        self.mask_BT = torch.zeros(len(self.slots), 0, dtype=torch.bool, device=self.device)
        self.prefix: list[int] = []
        self.prefix_cache = RowCache(model.config)

    def run(self) -> Iterator[tuple[Request, Result]]:
        """Rows as they end."""
        while True:
            free = self.slots.count(None)
            if self.queue and free >= max(1, REFILL_SHARE * len(self.slots)):
                for group in self._groups(free):
                    yield from self._ended(self._enter(group))
            elif free == len(self.slots):
                return
            else:
                if not self.queue and len(self.slots) - free <= SHRINK_SHARE * len(self.slots):
                    self._shrink()
                yield from self._ended(self._step())

    def _groups(self, free: int) -> list[list[Row]]:
        """Rows for the free slots, from the queue, in groups to be run together: of one beginning and about one length."""
        groups: list[list[Row]] = []
        budget = PREFILL_TOKENS[self.device.type]
        for _ in range(min(free, len(self.queue))):
            row, longest = self.queue.popleft(), groups[-1][0] if groups else None
            if (
                longest
                and longest.context[: longest.shared] == row.context[: row.shared]
                and (len(longest.context) - row.shared) * (len(groups[-1]) + 1) <= budget
                and (self.cache.ignores_masked_columns or len(longest.context) == len(row.context))
            ):
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    def _begun(self, group: list[Row]) -> RowCache:
        """A cache of the group's rows with their common beginning in it."""
        prefix = group[0].context[: group[0].shared]
        if prefix != self.prefix:
            self.prefix, self.prefix_cache = prefix, RowCache(self.model.config)
            if prefix:
                self._forward(torch.tensor([prefix], device=self.device), None, None, self.prefix_cache)
        cache = copy.deepcopy(self.prefix_cache)
        if prefix:
            cache.select(torch.zeros(len(group), dtype=torch.int64, device=self.device))
        return cache

    @torch.inference_mode()
    def _enter(self, group: list[Row]) -> list[Row]:
        """Run a group's prompts, sample its first tokens and give it slots."""
        cache, shared = self._begun(group), group[0].shared
        tails = [row.context[shared:] for row in group]
        length = len(tails[0])
        ids_NT = torch.tensor([[0] * (length - len(tail)) + tail for tail in tails], device=self.device)
        lengths_N = torch.tensor([len(tail) for tail in tails], device=self.device)
        positions_NT = torch.arange(length, device=self.device) - (length - lengths_N)[:, None]
        mask_NT = pad(positions_NT >= 0, (shared, 0), value=True)
        positions_NT = positions_NT.clamp(min=0) + shared
        logits_NV = self._forward(ids_NT, mask_NT, positions_NT, cache)
        slots = [slot for slot, row in enumerate(self.slots) if row is None][: len(group)]
        for slot, row in zip(slots, group):
            self.slots[slot] = row
        self._take_slots(torch.tensor(slots, device=self.device), cache, mask_NT)
        return self._sample(logits_NV, slots)

    def _take_slots(self, slots_N: torch.Tensor, cache: RowCache, mask_NT: torch.Tensor) -> None:
        """Put a group's cache into its slots."""
        columns = mask_NT.shape[1]
        if not self.mask_BT.shape[1]:
            # The first group opens the batch: its first row fills all slots, masked where no row is in them.
            source_B = torch.zeros(len(self.slots), dtype=torch.int64, device=self.device)
            source_B[slots_N] = torch.arange(len(slots_N), device=self.device)
            cache.select(source_B)
            self.cache = cache
            self.mask_BT = pad(self.mask_BT, (columns, 0))
        else:
            self._drop_columns(keep=columns)
            missing = columns - self.mask_BT.shape[1]
            if missing > 0:
                self.mask_BT = pad(self.mask_BT, (missing, 0))
            self.cache.widen(self.mask_BT.shape[1])
            self.cache.adopt(slots_N, cache)
        self.mask_BT[slots_N] = pad(mask_NT, (self.mask_BT.shape[1] - columns, 0))

    def _drop_columns(self, keep: int) -> None:
        """Let go of columns that no living row began with, but for the last `keep`."""
        alive_T = self.mask_BT.any(0).nonzero()
        first = min([self.mask_BT.shape[1] - keep, *alive_T[:1, 0].tolist()])
        if first <= 0:
            return
        self.cache.drop(first)
        self.mask_BT = self.mask_BT[:, first:]

    @torch.inference_mode()
    def _step(self) -> list[Row]:
        """Feed every slot its last token and sample the next."""
        # An empty slot sees the column that it writes itself, and nobody else does.
        self.mask_BT = pad(self.mask_BT, (0, 1), value=True)
        ids_B1 = torch.tensor(self.tokens, device=self.device)[:, None]
        lengths = [len(row.context) + len(row.ids) if row else 1 for row in self.slots]
        positions_B1 = torch.tensor(lengths, device=self.device)[:, None] - 1
        logits_BV = self._forward(ids_B1, self.mask_BT, positions_B1, self.cache)
        slots = [slot for slot, row in enumerate(self.slots) if row is not None]
        return self._sample(logits_BV if len(slots) == len(self.slots) else logits_BV[slots], slots)

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None, cache: RowCache
    ) -> torch.Tensor:
        """Logits [B, V] behind the last column."""
        output = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True, logits_to_keep=1
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _sample(self, logits_NV: torch.Tensor, slots: list[int]) -> list[Row]:
        """Append a token to the rows in `slots`, and take out those that end with it."""
        rows = [row for slot in slots if (row := self.slots[slot])]
        drawn = draw(logits_NV, self.sampling, [row.request.seed for row in rows], [row.steps for row in rows])
        ended = []
        for slot, row, token in zip(slots, rows, drawn.tolist()):
            row.ids.append(token)
            self.tokens[slot] = token
            if token in self.stop_ids or len(row.ids) >= row.request.max_new_tokens:
                ended.append(row)
                self.slots[slot] = None
                self.mask_BT[slot] = False
        return ended

    @torch.inference_mode()
    def _shrink(self) -> None:
        """Cut the batch to the slots that hold a row, and the cache to the columns that they need."""
        living = [slot for slot, row in enumerate(self.slots) if row is not None]
        index_N = torch.tensor(living, device=self.device)
        self.slots = [self.slots[slot] for slot in living]
        self.tokens = [self.tokens[slot] for slot in living]
        self.mask_BT = self.mask_BT[index_N]
        self.cache.select(index_N)
        self._drop_columns(keep=0)

    def _ended(self, rows: list[Row]) -> Iterator[tuple[Request, Result]]:
        for row in rows:
            yield row.request, Result(row.ids, "stop" if row.ids[-1] in self.stop_ids else "length")


def _mark_shared(rows: list[Row]) -> None:
    """Set each row's `shared`: the longest beginning, short of the whole, that it has in common with `SHARED` - 1 others."""
    rows = sorted(rows, key=lambda row: row.context)
    for n in range(len(rows) - SHARED + 1):
        # In sorted order, what the first and the last have in common, all between them have.
        window = rows[n : n + SHARED]
        limit = min(len(row.context) for row in window) - 1
        first, last = window[0].context, window[-1].context
        common = next((k for k in range(limit) if first[k] != last[k]), limit)
        for row in window:
            row.shared = max(row.shared, common)
