"""Samples made ready while the device trains on those before: read from the disk, and brought to a GPU beside its computing.

A step of a large drafter takes a fifth of a second a sample; reading 110 MB for it from a disk that gives one gigabyte a second takes half
of that. So the samples of the next step are read during a step.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from draftline.host_buffers import Buffers
from draftline.storage import decode

Item = TypeVar("Item")


class Uploads:
    """Features brought to a device, by one thread: through pinned memory, on a stream of their own."""

    def __init__(self, device: str) -> None:
        self._device, self._buffers = device, Buffers()
        self._stream: torch.cuda.Stream | None = None

    def features(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Features [T, F] of what `StatesReader.stored` gives, on the device; on a GPU their memory belongs to this stream.

        On the CPU those that are stored plainly stay views of the file.
        """
        if self._device == "cpu":
            return decode(stored)
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            pinned = {name: self._buffers.room(name, rows, pinned=True).copy_(rows) for name, rows in stored.items()}
            features_TF = decode({name: rows.to(self._device, non_blocking=True) for name, rows in pinned.items()})
        self._stream.synchronize()
        return features_TF


def ahead(items: Iterator[Item], count: int) -> Iterator[Item]:
    """The same items, of which `count` are made by a thread before they are asked for."""
    end = object()
    pool = ThreadPoolExecutor(1, "samples-ahead")
    try:
        waiting = deque(pool.submit(next, items, end) for _ in range(count))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, items, end))
            yield item  # type: ignore[misc]  # not the end
    finally:
        pool.shutdown(cancel_futures=True)
