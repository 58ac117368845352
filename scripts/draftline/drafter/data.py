"""The order in which a drafter meets its samples.

Parts come in sequence, epoch after epoch; the samples of a part are shuffled anew at each visit. The order follows from
(drafter seed, epoch, part) alone, so it can be taken up at any place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from draftline.drafter.anchors import seeded
from draftline.drafter.uploads import Uploads
from draftline.errors import DraftlineError
from draftline.states import PARTS_AGREE, STATES_FACTS, StatesReader, difference

if TYPE_CHECKING:
    from draftline.manifest import Manifest

Visit = tuple[int, str, str]
"""(epoch, shard, part)."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A sample at one of its visits, T tokens: `features` [T, F] in storage dtype, `input_ids` int64, `loss_mask` bool."""

    id: str
    epoch: int
    features: Tensor
    input_ids: Tensor
    loss_mask: Tensor

    def on(self, device: str) -> "Sample":
        """The sample with its features on a device, for the stream in use there."""
        features = self.features.to(device)
        if features.is_cuda:  # Their memory is of another stream (`Uploads`), which must not take it back too early.
            features.record_stream(torch.cuda.current_stream())
        return replace(self, features=features)


class Parts:
    """The files of hidden states that a segment reads, by shard and part; features come to `device`.

    Raises DraftlineError with the path of a file that is missing, cut, of another target, or of other layers than the first,
    and with both where two were not made alike: by other kernels, say.
    """

    def __init__(self, paths: Sequence[str], manifest: "Manifest", visits: Sequence[Visit], device: str) -> None:
        self._manifest, self._uploads = manifest, Uploads(device)
        self._paths = {(Path(path).parent.name, Path(path).stem): path for path in paths}
        for _, shard, part in visits:
            if (shard, part) not in self._paths:
                raise DraftlineError(
                    f"--parts: hidden_states/{shard}/{part}.safetensors: missing, but this segment reads it"
                )
        first = StatesReader(paths[0], manifest)
        self.layers = first.layers
        self.facts = {name: first.facts[name] for name in (*STATES_FACTS, "target")}
        self.sizes: dict[tuple[str, str], int] = {}
        for key in self._paths:
            reader = self.open(*key)
            require_alike(reader.path, reader.facts, str(first.path), self.facts)
            self.sizes[key] = len(reader)

    def open(self, shard: str, part: str) -> StatesReader:
        """The reader of a part."""
        return StatesReader(self._paths[shard, part], self._manifest, self.layers)

    def samples(self, visit: Visit, seed: int, taken: int) -> Iterator[Sample]:
        """The samples of a visit in its order, without the first `taken`."""
        epoch, shard, part = visit
        reader = self.open(shard, part)
        order = torch.randperm(len(reader), generator=seeded(seed, epoch, shard, part))
        for n in order[taken:].tolist():
            features = self._uploads.features(reader.stored(n))
            yield Sample(reader.ids[n], epoch, features, reader.input_ids(n), reader.loss_mask(n))


def require_alike(path: str | Path, facts: Mapping[str, Any], other: str, others: Mapping[str, Any]) -> None:
    """Raise DraftlineError unless the states at `path` were made like those of `other`, a file or a training."""
    if differing := difference(other, facts, others, PARTS_AGREE):
        raise DraftlineError(
            f"{path}: not made like the other states of this training: {differing}; delete the ones that are wrong and"
            " make them again where the others were made"
        )
