"""The table of `make gpus`: each GPU, its memory, the job that leases it, and processes on it that belong to no lease."""

import os
import sys
import time

import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftline.gpus import Device, Lease, Nvml, Process, gib, holder, visible


def belongs(process: Process, lease: Lease | None) -> bool:
    """Whether a process is a lease's job or was started by it."""
    if lease is None or process.pid is None:
        return False
    try:
        return lease.pid in (process.pid, *(parent.pid for parent in psutil.Process(process.pid).parents()))
    except psutil.Error:
        return False


def table(devices: list[Device], chosen: list[Device]) -> Table:
    """A row a device, and one for each of its processes that belong to no lease. `chosen`: those that jobs may take."""
    result = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for heading in ("GPU", "name", "memory", "state", "by"):
        result.add_column(heading, justify="right" if heading == "memory" else "left", overflow="fold")
    for device in devices:
        lease = None if device.trouble else holder(device.uuid)
        foreign = [process for process in device.processes if not belongs(process, lease)]
        memory = f"{device.used / 2**30:.1f} / {gib(device.total)}" if device.total else "-"
        name = Text.assemble(device.name, "\n", (device.uuid, "dim"))
        result.add_row(device.label, name, memory, *_state(device, lease, device in chosen))
        for process in foreign:
            size = "?" if process.memory is None else gib(process.memory)
            kind = Text("foreign", style="red") if process.compute else Text("draws only", style="dim")
            result.add_row("", "", size, kind, Text(f"pid {process.pid}, {process.user}: {process.command}"))
    return result


def _state(device: Device, lease: Lease | None, chosen: bool) -> tuple[Text, Text]:
    if lease:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(lease.since))
        by = f"{lease.rule} {lease.output}, pid {lease.pid} in {lease.cwd}, since {since}" if lease.pid else str(lease)
        return Text("leased", style="cyan"), Text(by)
    if device.trouble:
        return Text("unusable", style="red"), Text(device.trouble)
    if device.blockers:
        hidden = [] if any(process.compute for process in device.processes) else device.blockers
        return Text("held", style="red"), Text("; ".join(hidden))
    if not chosen:
        return Text("left out", style="dim"), Text("not in CUDA_VISIBLE_DEVICES")
    return Text("free", style="green"), Text("")


def show() -> None:
    """Print the table, at least 120 columns wide where the output is no terminal."""
    with Nvml() as nvml:
        devices = nvml.devices()
    chosen = visible(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
    console = Console() if sys.stdout.isatty() else Console(width=140)
    console.print(table(devices, chosen))
