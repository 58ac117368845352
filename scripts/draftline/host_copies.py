"""Tensors brought to the host while the device computes on.

On a GPU they are copied on a stream of their own into pinned memory, which the hardware reads and writes beside its computing;
a copy to ordinary memory would wait for all that was asked of the device before, and go through a buffer of the driver.
"""

from collections.abc import Mapping

import torch

from draftline.host_buffers import Buffers


def computed(tensor: torch.Tensor) -> "torch.cuda.Event | None":
    """A mark behind all that was asked of the tensor's GPU so far; None on the CPU, where it is done."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event


class HostCopies:
    """Copies for one thread, into memory that each call uses again."""

    def __init__(self) -> None:
        self._buffers = Buffers()
        self._stream: torch.cuda.Stream | None = None

    def fetch(self, tensors: Mapping[str, torch.Tensor], ready: "torch.cuda.Event | None") -> dict[str, torch.Tensor]:
        """The tensors, of one device, on the host once `ready` is reached; valid until the next call."""
        if ready is None:
            return self._copied(tensors)
        if self._stream is None:
            self._stream = torch.cuda.Stream(next(iter(tensors.values())).device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            copies = self._copied(tensors)
        self._stream.synchronize()
        return copies

    def _copied(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: self._buffers.room(name, tensor, pinned=tensor.is_cuda).copy_(tensor, non_blocking=True)
            for name, tensor in tensors.items()
        }
