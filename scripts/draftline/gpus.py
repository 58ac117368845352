"""GPUs of this machine: what NVML shows of them, and the lease that gives a job devices of its own.

A lease is an exclusive flock on a file named after the device's UUID, in one folder for all runs and users of the machine. It
is held by the job's process alone and ends with it, whatever ends it. A process that a dead job left on the device has no
lease: it is foreign, and named.

A device is free when nobody holds its lock and NVML shows no compute process on it. Processes that only draw (an X server) do
not count. Memory in use that no listed process explains does: containers hide processes, never memory.
"""

import contextlib
import fcntl
import json
import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from draftline.errors import DraftlineError
from draftline.progress import say

LEASES = Path(os.environ.get("DRAFTLINE_GPU_LEASES", "/tmp/draftline-gpus"))
"""One folder for all users, not TMPDIR: who looks elsewhere sees no lease. UUIDs are unique, so machines may share it."""
PATIENCE = 60.0
"""Seconds to wait for devices that other leases hold: Snakemake starts a job in the moment in which another ends."""
SETTLING = 10.0
"""Seconds in which a process that ended may still show on its device."""
UNSEEN = 1 << 30
"""Bytes in use without a process from which on a device counts as held. An idle device shows a few hundred MiB at most."""
FILE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

_held: list[int] = []
"""Descriptors of this process's leases: open until it ends. A forked worker closes them, a started program never has them."""


def _close_held() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_held)


# What is there --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """A process on a device. `memory` in bytes, None where the driver does not tell; `pid` None where only memory shows."""

    pid: int | None
    memory: int | None
    command: str
    user: str
    compute: bool = True

    def __str__(self) -> str:
        size = "unknown memory" if self.memory is None else gib(self.memory)
        who = self.command if self.pid is None else f"process {self.pid} ({_cut(self.command)})"
        return f"{who}, {size}"


@dataclass(frozen=True)
class Lease:
    """Who holds a device, as its lock file says; `pid` 0 for a job that is just taking it."""

    pid: int
    rule: str
    output: str
    cwd: str
    since: float

    def __str__(self) -> str:
        return f"{self.rule} {self.output} (process {self.pid} in {self.cwd})" if self.pid else "a job that is starting"


@dataclass(frozen=True)
class Device:
    """A GPU or a MIG device. `label` is nvidia-smi's number, `1` or `1:0`; `parent` the UUID of a MIG device's GPU.

    A device with `trouble` (lost, say) cannot be used. `total` and `used` are bytes, without what the driver reserves.
    """

    label: str
    uuid: str
    name: str
    parent: str = ""
    total: int = 0
    used: int = 0
    processes: tuple[Process, ...] = ()
    trouble: str = ""

    def __str__(self) -> str:
        return f"GPU {self.label}"

    @property
    def blockers(self) -> list[str]:
        """Why the device is not free, leases aside; empty when it is."""
        if self.trouble:
            return [self.trouble]
        found = [process for process in self.processes if process.compute]
        known = [process.memory for process in self.processes]
        unseen = self.used - sum(memory or 0 for memory in known)
        if not found and None not in known and unseen > UNSEEN:
            found = [Process(None, unseen, "a process that cannot be seen from here (another container?)", "?")]
        return [f"held by {process}" for process in found]


class Nvml:
    """An open NVML. `devices()` reads anew at each call; raises DraftlineError where there is no driver."""

    def __init__(self) -> None:
        try:
            import pynvml
        except ModuleNotFoundError:
            raise DraftlineError(
                "the Python package nvidia-ml-py is missing; install it, or set run.device: cpu"
            ) from None
        self._nvml: Any = pynvml
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise DraftlineError(
                f"no NVIDIA driver answers here ({error}); see whether nvidia-smi works, or set run.device: cpu"
            ) from None

    def __enter__(self) -> "Nvml":
        return self

    def __exit__(self, *_: object) -> None:
        self._nvml.nvmlShutdown()

    def driver(self) -> str:
        """Version of the driver."""
        return str(self._nvml.nvmlSystemGetDriverVersion())

    def devices(self) -> list[Device]:
        """All devices in nvidia-smi's order, MIG devices in place of their GPU."""
        return [device for index in range(self._nvml.nvmlDeviceGetCount()) for device in self._gpu(index)]

    def visible(self) -> list[Device]:
        """Those that CUDA_VISIBLE_DEVICES leaves."""
        return visible(self.devices(), os.environ.get("CUDA_VISIBLE_DEVICES"))

    def _gpu(self, index: int) -> list[Device]:
        nvml, label = self._nvml, str(index)
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = nvml.nvmlDeviceGetUUID(handle)
            if not self._ask(nvml.nvmlDeviceGetMigMode, handle, otherwise=[0])[0]:
                return [self._device(handle, label, uuid)]
            parts = list(self._parts(handle, label, uuid))
            return parts or [
                Device(label, uuid, nvml.nvmlDeviceGetName(handle), trouble="in MIG mode, without MIG devices")
            ]
        except nvml.NVMLError as error:
            return [Device(label, "", "?", trouble=f"not usable ({error})")]

    def _ask(self, function: Callable[..., Any], *arguments: Any, otherwise: Any) -> Any:
        """What NVML answers, or `otherwise` where this kind of device has no such thing."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError_NotSupported:
            return otherwise

    def _parts(self, handle: Any, label: str, parent: str) -> Iterator[Device]:
        nvml = self._nvml
        for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(nvml.NVMLError_NotFound):
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
                yield self._device(part, f"{label}:{place}", nvml.nvmlDeviceGetUUID(part), parent)

    def _device(self, handle: Any, label: str, uuid: str, parent: str = "") -> Device:
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2, otherwise=None)
        draw = self._ask(nvml.nvmlDeviceGetGraphicsRunningProcesses, handle, otherwise=[])
        compute = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle, otherwise=[])
        # A process that does both stands in both lists.
        processes = _processes(draw, compute=False) | _processes(compute, compute=True)
        total, used = (memory.total, memory.used) if memory else (0, 0)
        return Device(label, uuid, nvml.nvmlDeviceGetName(handle), parent, total, used, tuple(processes.values()))


def _processes(found: list[Any], compute: bool) -> dict[int, Process]:
    return {item.pid: Process(item.pid, item.usedGpuMemory, *_who(item.pid), compute) for item in found}


def _who(pid: int) -> tuple[str, str]:
    """Command line and user of a process."""
    try:
        process = psutil.Process(pid)
        return plain(" ".join(process.cmdline()) or process.name()), plain(process.username())
    except psutil.Error:
        return "not visible from here", "?"


def plain(text: str) -> str:
    """Text of others in one line, without control characters that a terminal would obey."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _cut(text: str, width: int = 80) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def visible(devices: list[Device], names: str | None) -> list[Device]:
    """The devices that CUDA_VISIBLE_DEVICES names: numbers as nvidia-smi shows them, UUIDs, beginnings of UUIDs. None: all.

    A GPU in MIG mode stands for all its MIG devices. Raises DraftlineError for a name that fits no device, or several.
    """
    if names is None:
        return devices
    found: dict[str, Device] = {}
    for name in (part.strip() for part in names.split(",")):
        if name in ("", "-1", "NoDevFiles"):  # CUDA's and SLURM's ways to say: none from here on.
            break
        fitting = {device: full for device in devices if (full := _full_name(device, name))}
        if len(set(fitting.values())) != 1:
            known = ", ".join(f"{device.label} {device.uuid}" for device in devices) or "none"
            fits = "fits several GPUs" if fitting else "no such GPU here"
            raise DraftlineError(f"CUDA_VISIBLE_DEVICES: {name}: {fits}; there are: {known}")
        found |= {device.label: device for device in fitting}
    return list(found.values())


def _full_name(device: Device, name: str) -> str | None:
    """What `name` stands for if it names a device or its GPU: number or whole UUID."""
    if name.isdigit():
        return name if device.label.partition(":")[0] == name else None
    uuids = [uuid for uuid in (device.uuid, device.parent) if uuid.startswith(name)]
    return uuids[0] if uuids and name.startswith(("GPU-", "MIG-")) else None


# Locks ----------------------------------------------------------------------------------------------------------------


def _folder() -> int:
    """Descriptor of the folder of locks, which is made for all users like /tmp itself. Never through a symbolic link."""
    mask = os.umask(0)
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(LEASES, 0o1777)
        return os.open(LEASES, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise DraftlineError(
            f"{LEASES}: no place for GPU leases ({error.strerror}); it must be a folder that all users may write, "
            "or name another one for all of them in DRAFTLINE_GPU_LEASES"
        ) from None
    finally:
        os.umask(mask)


def _open(uuid: str, folder: int) -> int:
    """Descriptor of a device's lock file. Opened before it is made: Linux refuses O_CREAT on another user's file here."""
    mask = os.umask(0)
    try:
        while True:
            with contextlib.suppress(FileNotFoundError):
                return os.open(uuid, os.O_RDWR | FILE_FLAGS, dir_fd=folder)
            with contextlib.suppress(FileExistsError):
                return os.open(uuid, os.O_RDWR | os.O_CREAT | os.O_EXCL | FILE_FLAGS, 0o666, dir_fd=folder)
    except OSError as error:
        raise DraftlineError(
            f"{LEASES / uuid}: no usable lock file ({error.strerror}); delete it, and see that all users may write {LEASES}"
        ) from None
    finally:
        os.umask(mask)


def _lock(uuid: str) -> int | None:
    """Take a device's lock: its descriptor, or None when somebody else has it."""
    folder = _folder()
    try:
        descriptor = _open(uuid, folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise DraftlineError(f"{LEASES / uuid}: not a lock file of Draftline's; delete it and run again")
            if os.stat(uuid, dir_fd=folder, follow_symlinks=False).st_ino != status.st_ino:
                raise FileNotFoundError
            os.ftruncate(descriptor, 0)
            return descriptor
        except (BlockingIOError, FileNotFoundError):  # Held, or deleted between opening and locking: no lock this time.
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
    finally:
        os.close(folder)


def holder(uuid: str) -> Lease | None:
    """Who holds a device's lock; None when nobody does, so for a dead process's too."""
    try:
        descriptor = os.open(LEASES / uuid, os.O_RDONLY | FILE_FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DraftlineError(f"{LEASES / uuid}: not readable ({error.strerror}); delete it") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _note(os.pread(descriptor, 65536, 0))
    finally:
        os.close(descriptor)


def _note(content: bytes) -> Lease:
    try:
        note = json.loads(content)
        rule, output, cwd = (plain(str(note[key])) for key in ("rule", "output", "cwd"))
        return Lease(int(note["pid"]), rule, output, cwd, float(note["since"]))
    except (ValueError, KeyError, TypeError):
        return Lease(0, "?", "?", "?", time.time())


# The lease ------------------------------------------------------------------------------------------------------------


def free() -> tuple[list[Device], list[str]]:
    """Visible devices that a job could take now, and why each other one could not."""
    with Nvml() as nvml:
        devices = nvml.visible()
    taken = {device.label: _taken(device) for device in devices}
    reasons = [f"{device} is {reason}" for device in devices for reason in taken[device.label]]
    return [device for device in devices if not taken[device.label]], reasons


def _taken(device: Device) -> list[str]:
    lease = None if device.trouble else holder(device.uuid)
    return [f"leased by {lease}"] if lease else device.blockers


def lease(wanted: int, given: int, rule: str, output: str) -> None:
    """Give this process `wanted` devices of its own until it ends, by CUDA_VISIBLE_DEVICES. Call before torch is imported.

    `given` is what Snakemake granted: it scales a request down to its limit without a word. Where SLURM gave exactly as many
    devices as wanted, they are taken as they are. Raises DraftlineError when it were fewer, or when too few are free.
    """
    if given < wanted:
        raise DraftlineError(
            f"needs {_count(wanted)} (run.device: cuda) and was given {given}, the run's limit (resources: gpu); "
            f"run with --workflow-profile profiles/local-gpu, or --resources gpu={wanted}"
        )
    if wanted == 0:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    if "SLURM_JOB_ID" in os.environ and _assigned(wanted):
        return
    with Nvml() as nvml:
        found = _acquire(nvml, wanted, {"pid": os.getpid(), "rule": rule, "output": output, "cwd": os.getcwd()})
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(device.uuid for device in found)
    say(f"{rule}: {', '.join(f'{device} ({device.uuid})' for device in found)}")


def _assigned(wanted: int) -> bool:
    """Whether SLURM gave just the devices that are wanted. More (a whole node) are shared out by leases."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    given = len([name for name in names.split(",") if name.strip()])
    if given < wanted:
        raise DraftlineError(
            f"needs {_count(wanted)} and SLURM gave job {os.environ['SLURM_JOB_ID']} {given} on this node "
            f"(CUDA_VISIBLE_DEVICES: {names or 'not set'}); ask for gpu={wanted} with nodes=1 in the profile"
        )
    return given == wanted


def _acquire(nvml: Nvml, wanted: int, note: dict[str, Any]) -> list[Device]:
    """Lock `wanted` free devices, all or none, and wait a little where that can help."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    started, told = time.monotonic(), False
    while True:
        there = nvml.visible()
        # CUDA shows a process the first MIG device alone, so a job of several devices takes whole GPUs.
        pool = there if wanted == 1 else [device for device in there if not device.parent]
        if len(pool) < wanted:
            parts = "; MIG devices cannot be combined" if len(pool) < len(there) else ""
            raise DraftlineError(
                f"needs {_count(wanted)}, and there are {len(pool)} here{_among(names)}{parts}; "
                "let it see more, or lower its gpus below run: in the config"
            )
        locks, leased, held = _attempt(nvml, pool, wanted)
        if len(locks) == wanted:
            _keep(list(locks.values()), note)
            return [device for device in pool if device.label in locks]
        for descriptor in locks.values():
            os.close(descriptor)
        reasons = "; ".join(leased + held)
        waited = time.monotonic() - started
        if waited > (PATIENCE if len(locks) + len(leased) >= wanted else SETTLING):
            raise DraftlineError(
                f"needs {_count(wanted)}, and {len(locks)} of {len(pool)}{_among(names)} are free: {reasons}\n"
                "Wait for these or end them, then run again; make gpus shows all, CUDA_VISIBLE_DEVICES chooses among them"
            )
        if not told and waited > 2:
            told = True
            say(f"{note['rule']}: waiting for {_count(wanted)}: {reasons}")
        time.sleep(random.uniform(0.3, 0.7))


def _attempt(nvml: Nvml, pool: list[Device], wanted: int) -> tuple[dict[str, int], list[str], list[str]]:
    """Locks by label, at most as many as wanted, of free devices; who leases others; what holds the rest."""
    locks: dict[str, int] = {}
    leased, held = [], []
    for device in pool:
        if len(locks) == wanted:
            break
        descriptor = None if device.trouble else _lock(device.uuid)
        if descriptor is None and not device.trouble:
            leased.append(f"{device} is leased by {holder(device.uuid) or 'a job that is starting'}")
            continue
        # Read again under the lock: what was seen before it may be of a job that has ended since.
        now = next((other for other in nvml.devices() if other.label == device.label), device)
        held += [f"{device} is {reason}" for reason in now.blockers]
        if descriptor is not None and now.blockers:
            os.close(descriptor)
        elif descriptor is not None:
            locks[device.label] = descriptor
    return locks, leased, held


def _keep(descriptors: list[int], note: dict[str, Any]) -> None:
    _held.extend(descriptors)
    content = json.dumps({**note, "since": time.time()}).encode()
    for descriptor in descriptors:
        os.pwrite(descriptor, content, 0)


def _among(names: str | None) -> str:
    return "" if names is None else f" (CUDA_VISIBLE_DEVICES: {names or 'empty'})"


def _count(wanted: int) -> str:
    return f"{wanted} GPU" if wanted == 1 else f"{wanted} GPUs"
