"""A real SLURM on this one machine: two nodes with two GPUs each and a node without, all of them make-believe.

Needs root and Debian's slurm-wlm, and nothing else: no munge, cgroups or accounting. A GPU is a link to /dev/null, which
SLURM counts and hands out like any other. Jobs find the cluster by /etc/slurm/slurm.conf alone, so that is a link too.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

ETC = Path("/etc/slurm")
FILES = ("slurm.conf", "gres.conf")
NODES = {"gpu1": 16821, "gpu2": 16822, "cpu1": 16840}

SLURM_CONF = """
ClusterName=box
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPort=16817
SlurmctldPidFile={box}/run/slurmctld.pid
SlurmdPidFile={box}/run/%n.pid
StateSaveLocation={box}/state
SlurmdSpoolDir={box}/spool/%n
SlurmctldLogFile={box}/log/slurmctld.log
SlurmdLogFile={box}/log/%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
DefMemPerCPU=500
MinJobAge=86400
SlurmdParameters=config_overrides
GresTypes=gpu
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
NodeName=gpu[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[16821-16822] CPUs=8 RealMemory=32000 Gres=gpu:h100:2
NodeName=cpu1 NodeHostname={host} NodeAddr=127.0.0.1 Port=16840 CPUs=16 RealMemory=32000
PartitionName=gpu Nodes=gpu[1-2] MaxTime=1-00:00:00 State=UP
PartitionName=cpu Nodes=cpu1 Default=YES MaxTime=1-00:00:00 State=UP
"""
GRES_CONF = "NodeName=gpu[1-2] Name=gpu Type=h100 File={box}/dev/nvidia[0-1] Flags=nvidia_gpu_env\n"


def why_not() -> str | None:
    """Why no SLURM can be started here."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if missing:
        return f"no {missing[0]} here; install Debian's slurm-wlm"
    if os.geteuid() != 0:
        return "slurmd needs root"
    for file in FILES:
        if (ETC / file).exists() and not (ETC / file).is_symlink():
            return f"{ETC / file} is a real cluster's; it is left alone"
    return None


class Box:
    """The daemons, with configuration, state and logs in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self) -> None:
        if (ETC / "slurm.conf").is_symlink():
            Box((ETC / "slurm.conf").readlink().parent).stop()  # Of a test run that was killed.
        for name in ("state", "log", "run", "dev", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        for number in range(2):
            (self.folder / f"dev/nvidia{number}").symlink_to("/dev/null")
        ETC.mkdir(exist_ok=True)
        for file, text in zip(FILES, (SLURM_CONF, GRES_CONF)):
            (self.folder / file).write_text(text.format(host=socket.gethostname().split(".")[0], box=self.folder))
            (ETC / file).unlink(missing_ok=True)
            (ETC / file).symlink_to(self.folder / file)
        subprocess.run(["slurmctld", "-c"], check=True)
        for node in NODES:
            self.start_node(node)
        until(lambda: slurm("sinfo", "-hN", "-o", "%T").split() == ["idle"] * len(NODES), "all nodes are idle")

    def start_node(self, node: str) -> None:
        subprocess.run(["slurmd", "-N", node], check=True)

    def kill_node(self, node: str) -> None:
        """SIGKILL of a node's slurmd. The jobs there have a process of their own above them and run on."""
        os.kill(int((self.folder / f"run/{node}.pid").read_text()), signal.SIGKILL)

    def stop(self) -> None:
        """End the jobs, the daemons and the links."""
        subprocess.run(["scancel", "--user=root"], check=False)
        until(lambda: slurm("squeue", "-h") == "", "all jobs ended")
        for file in (self.folder / "run").glob("*.pid"):
            daemon = Path("/proc", file.read_text().strip())
            if daemon.exists() and (daemon / "comm").read_text().startswith("slurm"):
                os.kill(int(daemon.name), signal.SIGTERM)
                until(lambda daemon=daemon: not daemon.exists(), f"{file.stem} ended")
        for name in FILES:
            (ETC / name).unlink(missing_ok=True)


def slurm(*command: str) -> str:
    """Output of a SLURM command; empty while the controller does not answer."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def until(holds: Callable[[], object], what: str, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain until {what}"
        time.sleep(0.2)
