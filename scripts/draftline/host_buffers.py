"""Host memory between a GPU and ordinary memory, for copies either way.

A module of its own: training reads through it, and a change of how hidden states are written is to make no drafter stale.
"""

import torch


class Buffers:
    """Host memory by name, used again and again; what a GPU copies from or to is pinned."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def room(self, name: str, tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
        """Memory of the tensor's dtype and shape."""
        if name not in self._buffers or self._buffers[name].nbytes < tensor.nbytes:
            self._buffers[name] = torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=pinned)
        return self._buffers[name][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
