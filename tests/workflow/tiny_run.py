"""A copy of the workflow in a folder of its own, and Snakemake on it, with the tiny target."""

import contextlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = Path(__file__).with_name("tiny.yaml")
CODE = ("Snakefile", "config.yaml", "rules", "scripts", "schemas", "profiles", "envs", "resources")
SNAKEMAKE = [sys.executable, "-m", "snakemake"]


class Run:
    """A copy of the workflow with its results, and Snakemake on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "tiny.yaml"

    def command(self, *arguments: str) -> list[str]:
        return [*SNAKEMAKE, *arguments, "--configfile", "tiny.yaml", "--cores", "2"]

    def snakemake(self, *arguments: str, check: bool = True, **how) -> subprocess.CompletedProcess:
        result = subprocess.run(
            self.command(*arguments), cwd=self.folder, capture_output=True, text=True, check=False, **how
        )
        if check:
            assert result.returncode == 0, result.stdout + result.stderr
        return result

    def pending(self, *arguments: str) -> dict[str, int]:
        """Jobs that a dry run would start: rule -> count."""
        output = self.snakemake("-n", *arguments).stdout
        found = re.findall(r"^(?:local)?rule (\w+):$", output, flags=re.MULTILINE)
        return {rule: found.count(rule) for rule in dict.fromkeys(found) if rule != "all"}

    def outputs(self, *arguments: str) -> set[str]:
        """Files that a dry run would make."""
        output = self.snakemake("-n", *arguments).stdout
        lines = re.findall(r"^    output: (.*)$", output, flags=re.MULTILINE)
        return {name.removesuffix(" (temp)") for line in lines for name in line.split(", ")}

    def working(self, rule: str) -> list[psutil.Process]:
        """Processes that run a rule's script in this folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[1:2] == [str(self.folder / "scripts" / f"{rule}.py")]:
                    found.append(process)
        return found

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.folder / file
        text = path.read_text()
        assert old in text, f"{file} has no {old!r}"
        path.write_text(text.replace(old, new, 1))

    def copy(self, folder: Path) -> "Run":
        shutil.copytree(self.folder, folder, symlinks=True)
        return Run(folder)


def make_run(folder: Path) -> Run:
    folder.mkdir(parents=True)
    for name in CODE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    shutil.copy2(TINY, folder / "tiny.yaml")
    return Run(folder)
