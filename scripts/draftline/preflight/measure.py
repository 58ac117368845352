"""Figures of a scene, taken by `draftline.preflight.probe` in child processes with a time limit.

This process never starts CUDA. A probe that hangs, crashes or raises gives ``{"error": ..., "stage": ...}`` of its part.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.errors import DraftlineError
from draftline.preflight.scene import Scene

PROBE = Path(__file__).with_name("probe.py")
MODULES = {
    "torch": "torch",
    "transformers": "transformers.models.auto.modeling_auto",
    "fla": "fla.ops.gated_delta_rule",
    "causal_conv1d": "causal_conv1d",
}
"""What is imported of a package: the part that holds code for the device."""
UNKILLABLE = 10.0
"""Seconds for a killed probe to go. One that waits inside the kernel (a dead mount, a lost GPU) may stay for good."""

Figures = dict[str, dict[str, Any]]
"""By part of the scene (`Scene.parts`): what its probe gave, or its ``error`` and the ``stage`` that it was in."""


@dataclass(frozen=True)
class Load:
    """How much the probes do, and on what: cuda, or cpu in tests."""

    on: str = "cuda"
    size: int = 8192
    seconds: float = 2.0
    megabytes: int = 256
    rounds: int = 20

    def device(self, place: int) -> str:
        """torch's name of the device at a place among the visible ones."""
        return f"cuda:{place}" if self.on == "cuda" else self.on


def measure(scene: Scene, parts: Collection[str], timeout: float, load: Load) -> Figures:
    """Figures of `parts`: disks one after the other, then the devices at once, then the group if all was well so far.

    `timeout` holds for each of these steps, in seconds. Raises DraftlineError when the disk of results/ is full: that
    is not the node's fault.
    """
    figures: Figures = {}
    for mount, folder in scene.folders.items():
        if mount in parts:
            _check_space(folder, load.megabytes)
            disk = Probe("disk", {"folder": folder, "megabytes": load.megabytes})
            figures[mount] = {"folder": os.path.abspath(folder), **await_probes([disk], timeout)[0]}
    devices = [device for device in scene.devices if device.uuid in parts]
    modules = [MODULES[name] for name in scene.versions]
    arguments = {
        "device": load.device(0),
        "size": load.size,
        "seconds": load.seconds,
        "modules": modules,
    }
    probes = [Probe("device", arguments, {"CUDA_VISIBLE_DEVICES": device.uuid}) for device in devices]
    for device, answer in zip(devices, await_probes(probes, timeout), strict=True):
        about = {"gpu": device.label, "kind": device.name, "versions": scene.versions}
        figures[device.uuid] = {**about, **answer}
    if scene.group in parts and not any("error" in answer for answer in figures.values()):
        figures[str(scene.group)] = {"versions": scene.versions, **_all_reduce(scene, timeout, load)}
    return figures


def _check_space(folder: str, megabytes: int) -> None:
    if folder == "results" and shutil.disk_usage(folder).free < 2 * megabytes * 1_000_000:
        raise DraftlineError("results: the disk is full; free some space or move results/ to a larger disk")


def _all_reduce(scene: Scene, timeout: float, load: Load) -> dict[str, Any]:
    world = len(scene.devices)
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(device.uuid for device in scene.devices)}
    with tempfile.TemporaryDirectory(prefix="draftline-preflight-") as folder:
        common = {"world": world, "store": f"{folder}/store", "megabytes": load.megabytes, "rounds": load.rounds}
        ranks = [
            Probe("all_reduce", {"device": load.device(rank), "rank": rank, **common}, visible) for rank in range(world)
        ]
        answers = await_probes(ranks, timeout, together=True)
    for device, answer in zip(scene.devices, answers, strict=True):
        if "error" in answer and not answer.get("stopped"):
            return answer | {"error": f"{device.uuid}: {answer['error']}"}
    return {"gb_s": min(answer["gb_s"] for answer in answers)}


class Probe:
    """A running probe."""

    def __init__(self, name: str, arguments: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        # In memory: a full scratch disk must not hide itself, and a pipe would wait for a process that never goes.
        self._out, self._err = (os.fdopen(os.memfd_create(f"{name}-{kind}"), "w+b") for kind in ("out", "err"))
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(PROBE), name, json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            env={**os.environ, **(environment or {})},
        )

    def end(self) -> None:
        """Kill the process if it runs."""
        if self.process.poll() is None:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(UNKILLABLE)

    def answer(self, why_ended: str | None) -> dict[str, Any]:
        """Its figures; else the stage that it was in and what happened there, `why_ended` if it did not end by itself."""
        lines = [json.loads(line) for line in _content(self._out).splitlines() if line.endswith("}")]
        if why_ended is None and self.process.returncode == 0:
            return dict(lines[-1]["figures"])
        stage = lines[-1]["stage"] if lines and "stage" in lines[-1] else "start of Python"
        errors = _content(self._err)
        print(errors, file=sys.stderr, end="")
        code = self.process.returncode
        if why_ended is None and code < 0:
            why_ended = f"ended by {signal.Signals(-code).name}"
        elif why_ended is None:
            why_ended = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), f"exit {code}")
        return {"error": f"{stage}: {why_ended}", "stage": stage}


def _content(file: Any) -> str:
    file.seek(0)
    return str(file.read().decode(errors="replace"))


def await_probes(probes: Sequence[Probe], timeout: float, together: bool = False) -> list[dict[str, Any]]:
    """The probes' answers. None runs on for more than `timeout` s, or, if they need each other, after one has failed.

    Those that were ended for another's failure say so by ``stopped``.
    """
    deadline = time.monotonic() + timeout
    failed = False
    try:
        while not failed and time.monotonic() < deadline and any(probe.process.poll() is None for probe in probes):
            time.sleep(0.05)
            failed = together and any(probe.process.poll() not in (None, 0) for probe in probes)
        running = [probe.process.poll() is None for probe in probes]
    finally:
        for probe in probes:
            probe.end()
    why = "another device's failure" if failed else f"no answer within {timeout:g} s"
    answers = [probe.answer(why if runs else None) for probe, runs in zip(probes, running, strict=True)]
    if failed:
        answers = [
            answer | {"stopped": True} if runs else answer for answer, runs in zip(answers, running, strict=True)
        ]
    return answers
