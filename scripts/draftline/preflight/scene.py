"""What a preflight is about: a node, its driver, the GPUs of a job, the packages that it will import, and the disks it uses."""

import contextlib
import json
import os
import re
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from draftline.errors import DraftlineError
from draftline.gpus import Device, Nvml

PACKAGES = {"torch": "torch", "transformers": "transformers"}
LINEAR_ATTENTION = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
"""Distribution names of what every target needs, and of the kernels that a target with linear attention runs on if installed."""


@dataclass(frozen=True)
class Scene:
    """What is looked at. `versions` are those of the installed packages, `folders` has a folder for each mount point."""

    node: str
    driver: str
    devices: tuple[Device, ...]
    versions: dict[str, str]
    folders: dict[str, str]

    @property
    def name(self) -> str:
        """Name of the record: node, driver and kinds of GPU."""
        kinds = "+".join(sorted({device.name for device in self.devices}))
        return re.sub(r"[^\w.+-]+", "_", f"{self.node}-{self.driver}-{kinds}")

    @property
    def uuids(self) -> frozenset[str]:
        return frozenset(device.uuid for device in self.devices)

    @property
    def group(self) -> str | None:
        """The devices together, as UUIDs joined by spaces; None for one alone."""
        return " ".join(sorted(self.uuids)) if len(self.devices) > 1 else None

    @property
    def parts(self) -> list[str]:
        """What has figures of its own, in the order of measuring: mount points, devices (UUID), the group."""
        return [*self.folders, *(device.uuid for device in self.devices), *filter(None, [self.group])]


def describe(driver: str, devices: Sequence[Device], manifest: str | None = None) -> Scene:
    """The scene of `devices` on this node, with results/ and the scratch folder (TMPDIR).

    `manifest` is the target's; where it has linear attention, the kernels for that count among the packages.
    """
    packages = dict(PACKAGES)
    if manifest and "linear_attention" in json.loads(Path(manifest).read_text(encoding="utf-8"))["layer_types"]:
        packages |= LINEAR_ATTENTION
    versions = {}
    for package, distribution in packages.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(distribution)
    scratch = os.environ.get("TMPDIR") or tempfile.gettempdir()
    return Scene(
        node_name(), driver, tuple(devices), versions, {mount_point(folder): folder for folder in (scratch, "results")}
    )


def node_name() -> str:
    """This node's name, as SLURM knows it where it does."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def mount_point(folder: str) -> str:
    """Mount point of the file system that holds `folder`."""
    path = os.path.realpath(folder)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path


def visible_devices() -> tuple[str, list[Device]]:
    """Driver version, and the GPUs that CUDA_VISIBLE_DEVICES leaves; CUDA is not started.

    Raises DraftlineError when there is none, or no driver.
    """
    with Nvml() as nvml:
        devices, driver = nvml.visible(), nvml.driver()
    if not devices:
        raise DraftlineError(f"node {node_name()}: no GPU is visible; look at CUDA_VISIBLE_DEVICES and nvidia-smi -L")
    return driver, devices
