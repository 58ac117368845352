"""Paths, and the targets that tests share: each is made once by the real command and kept for later runs."""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import pytest
import yaml

from hold import Hold

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from draftline import settings, sources  # noqa: E402
from draftline.errors import DraftlineError  # noqa: E402
from draftline.fingerprint import fingerprint  # noqa: E402
from draftline.manifest import Manifest  # noqa: E402

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftline-tests"
"""Where targets are kept between test runs, by their settings: config, code, source files."""

TARGET_DEFAULTS = {
    "chat_template": None,
    "mask_token_id": "auto",
    "num_layers": None,
    "trust_remote_code": False,
    "dtype": "float32",
}


@dataclass(frozen=True)
class MadeTarget:
    """Files of a finished `target` command. The manifest's `model` is absolute, so tests may run anywhere."""

    folder: Path
    manifest: Manifest

    @property
    def manifest_path(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def heads_path(self) -> Path:
        return self.folder / "heads.safetensors"

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / "tokenizer.json"


def run_target(target: dict[str, Any], place: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run scripts/target.py for a config's `target` in the working directory `place`, with its outputs in `folder`."""
    place.mkdir(parents=True, exist_ok=True)
    target = {**TARGET_DEFAULTS, **target}
    values: dict[str, Any] = {"rule": "target", "config": {"target": target}, "code": fingerprint("target")}
    found = sources.target(target, ROOT, place / "digests")
    if found:
        values["sources"] = found
    command = [sys.executable, str(ROOT / "scripts" / "target.py"), "--threads", "1"]
    command += ["--settings", str(settings.write(values, place / "settings"))]
    for name in ("manifest.json", "heads.safetensors", "tokenizer.json"):
        command += [f"--{name.partition('.')[0]}", str(folder / name)]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=600)


def made_target(target: dict[str, Any]) -> MadeTarget:
    """The finished target of a config, made now or at an earlier test run with the same settings."""
    full = {**TARGET_DEFAULTS, **target}
    identity = [full, fingerprint("target"), sources.target(full, ROOT, CACHE / "digests")]
    place = CACHE / settings.settings_hash({"target": identity})
    CACHE.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(place.with_suffix(".lock")):
        packages = place / "results" / ".resume" / "packages"
        if not packages.exists():
            (CACHE / "packages").mkdir(exist_ok=True)
            packages.parent.mkdir(parents=True, exist_ok=True)
            packages.symlink_to(CACHE / "packages")
        if not (place / "target" / "manifest.json").exists():
            done = run_target(target, place, place / "target")
            if done.returncode:
                raise DraftlineError(done.stderr.strip())
        os.utime(place)
    for other in [path.parent for path in CACHE.glob("*/target")]:
        # Another test process may make it now, or have removed it.
        with (
            contextlib.suppress(filelock.Timeout, FileNotFoundError),
            filelock.FileLock(other.with_suffix(".lock"), timeout=0),
        ):
            if time.time() - other.stat().st_mtime > 86400:
                shutil.rmtree(other, ignore_errors=True)
    return MadeTarget(place / "target", Manifest.load(place / "target" / "manifest.json"))


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Hold]:
    """Where the test's scripts wait; none does when it is over."""
    hold = Hold(tmp_path / "hold")
    yield hold
    hold.release_all()


@pytest.fixture(scope="session")
def tiny_target() -> MadeTarget:
    """The tiny hybrid target."""
    return made_target({"tiny": {"seed": 0}})


@pytest.fixture(scope="session")
def smollm2_target() -> MadeTarget:
    """config.yaml's target, SmolLM2-135M-Instruct; the test is skipped where its package cannot be had."""
    target = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))["target"]
    try:
        return made_target({"pypi": target["pypi"]})
    except DraftlineError as error:
        if "check the network" in str(error):
            pytest.skip(str(error))
        raise
