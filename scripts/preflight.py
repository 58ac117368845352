"""Look at this node as the first GPU job on it would, for all GPUs that are visible, and print the figures.

To be run in the working directory, on the node (under SLURM: srun -w NODE --gres=gpu:N). GPUs that a job leases are left out.
Recorded figures are shown where they hold. With --again everything is measured, and a node that passes is taken back. Limits are
those of run.preflight in the config that ran last here. Exit status 1 when a figure is off, or there is no GPU.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from draftline import gpus, preflight, progress
from draftline.errors import DraftlineError
from draftline.settings import ROOT

SCHEMA = Path(__file__).resolve().parent.parent / "schemas" / "config.schema.yaml"
MANIFEST = Path("results/target/manifest.json")


def limits() -> Mapping[str, float]:
    """Limits of the last run in this folder, else the schema's."""
    runs = sorted(Path(ROOT, "run").glob("*.json"), key=lambda path: path.stat().st_mtime)
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))["properties"]["run"]["properties"]["preflight"]
    defaults = {name: key["default"] for name, key in schema["properties"].items()}
    last = json.loads(runs[-1].read_text(encoding="utf-8"))["config"]["run"] if runs else {}
    return defaults | last.get("preflight", {})


def show(report: preflight.Report) -> None:
    """The table of figures."""
    scene = report.scene
    table = Table(box=SIMPLE_HEAD, title=f"node {scene.node}, driver {scene.driver}", title_justify="left")
    for name in ("part", "what", "figure", "limit", ""):
        table.add_column(name, overflow="fold")
    for check in report.checks:
        good = "[red]off[/red]" if check.problem else "[green]good[/green]"
        table.add_row(check.part, check.what, check.figure, check.limit, good)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main(again: bool) -> None:
    driver, devices = preflight.visible_devices()
    leases = {device: gpus.holder(device.uuid) for device in devices}
    for device, lease in leases.items():
        if lease:
            print(f"{device} is left out: leased by {lease}")
    idle = [device for device in devices if not leases[device]]
    if not idle:
        raise DraftlineError("every GPU is leased by a job; wait for one to end")
    scene = preflight.describe(driver, idle, str(MANIFEST) if MANIFEST.exists() else None)
    report = preflight.look(scene, limits(), again)
    show(report)
    if report.problems:
        raise DraftlineError("\n".join(preflight.verdict(report)))
    preflight.refuse(scene)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="scripts/preflight.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--again", action="store_true", help="measure whatever is recorded; take a mended node back")
    progress.terminal = sys.stderr
    try:
        main(parser.parse_args().again)
    except DraftlineError as error:
        sys.exit(f"preflight: {error}")
