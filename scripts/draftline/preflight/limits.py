"""Figures against limits: which are off, and what to do. Nothing is measured or read here."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from draftline.gpus import Device
from draftline.preflight.measure import Figures
from draftline.preflight.scene import Scene

DENSE_BF16 = {
    "NVIDIA GB200": 2500,
    "NVIDIA B200": 2250,
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 836,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA L40S": 362,
    "NVIDIA GeForce RTX 4090": 165,
    "NVIDIA GeForce RTX 3090": 71,
}
"""TFLOP/s in bf16 without sparsity, by the driver's name of the kind: NVIDIA's data sheets, for GeForce its white papers.

Healthy cards reach about 0.8 of it; one H200 gave 754 to 800.
"""

Rates = Mapping[str, Mapping[str, float]]
"""Known TFLOP/s by kind of GPU and UUID."""


@dataclass(frozen=True)
class Check:
    """A figure and its limit, for people; `problem` is None where all is well.

    `devices` are the UUIDs that it is about, none for the whole node. `environment` says that the packages may be to
    blame rather than the node.
    """

    part: str
    what: str
    figure: str
    limit: str
    problem: str | None
    devices: tuple[str, ...] = ()
    environment: bool = False


def checks(scene: Scene, figures: Figures, limits: Mapping[str, float], rates: Rates) -> list[Check]:
    """All figures of a scene against the config's `run.preflight`.

    A device is also held against the median of the others of its kind in `rates`: that finds the slow one among
    cards whose data sheet is not known here.
    """
    found: list[Check] = []
    for device in scene.devices:
        if device.uuid in figures:
            found += _device(device, figures[device.uuid], limits, rates.get(device.name, {}))
    if scene.group in figures:
        found += _group(str(scene.group), figures[str(scene.group)])
    for mount in scene.folders:
        if mount in figures:
            found += _disk(mount, figures[mount], limits)
    return found


def _device(
    device: Device, figures: Mapping[str, Any], limits: Mapping[str, float], rates: Mapping[str, float]
) -> Iterator[Check]:
    number = device.label.partition(":")[0]
    part, mine = f"{device} ({device.uuid}, {device.name})", (device.uuid,)
    if "error" in figures:
        environment = figures["stage"].startswith("import ")
        remedy = (
            "mend the packages of this Python"
            if environment
            else f"look at: dmesg | grep -i xid; nvidia-smi -q -i {number}; a reset or restart may help"
        )
        yield Check(part, figures["stage"], "failed", "", f"{figures['error']}; {remedy}", mine, environment)
        return
    if "memory_free_mb" in figures:
        free, total = figures["memory_free_mb"], figures["memory_total_mb"]
        least = limits["memory_free_share"] * total
        problem = (
            f"only {free:.0f} of {total:.0f} MB are free, limit {least:.0f}; see who holds them: nvidia-smi -i {number}"
        )
        yield Check(part, "free memory", f"{free:.0f} MB", f"{least:.0f}", problem if free < least else None, mine)
    rate, least, why = figures["tflops"], 0.0, "nothing to compare with"
    others = [other for uuid, other in rates.items() if uuid != device.uuid]
    if device.name in DENSE_BF16:
        least = limits["gemm_share"] * DENSE_BF16[device.name]
        why = f"{limits['gemm_share']:g} of the data sheet's {DENSE_BF16[device.name]}"
    if others and limits["gemm_peer_share"] * statistics.median(others) > least:
        least = limits["gemm_peer_share"] * statistics.median(others)
        why = f"{limits['gemm_peer_share']:g} of the median of {len(others)} others"
    problem = (
        f"matrix products at {rate:.3g} TFLOP/s, limit {least:.3g} ({why}); look at heat, power cap and clocks:"
        f" nvidia-smi -q -d PERFORMANCE,POWER,TEMPERATURE,CLOCK -i {number}"
    )
    yield Check(
        part,
        "matrix products",
        f"{rate:.3g} TFLOP/s",
        f"{least:.3g} ({why})" if least else why,
        problem if rate < least else None,
        mine,
    )


def _group(group: str, figures: Mapping[str, Any]) -> Iterator[Check]:
    devices = tuple(group.split())
    part = f"{len(devices)} GPUs together"
    if "error" in figures:
        problem = f"{figures['error']}; look at: nvidia-smi topo -m, nvidia-smi nvlink -s, and NCCL_DEBUG=INFO"
        yield Check(part, "all-reduce", "failed", "", problem, devices)
    else:
        yield Check(part, "all-reduce", f"{figures['gb_s']:.3g} GB/s", "", None, devices)


def _disk(mount: str, figures: Mapping[str, Any], limits: Mapping[str, float]) -> Iterator[Check]:
    part = f"{figures['folder']} (on {mount})"
    if "error" in figures:
        yield Check(part, figures["stage"], "failed", "", f"{figures['error']}; look at the mount: dmesg, df")
        return
    for key, verb in (("write_mb_s", "written"), ("read_mb_s", "read back")):
        rate, least = figures[key], limits[f"disk_{key}"]
        problem = f"{verb} at {rate:.3g} MB/s, limit {least:.3g}; look at the mount (dmesg, nfsstat) and at its load"
        yield Check(part, verb, f"{rate:.3g} MB/s", f"{least:.3g}", problem if rate < least else None)
