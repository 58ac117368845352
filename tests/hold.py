"""Scripts that wait at a chosen place, so that a test finds them there however fast they are, and however late it looks."""

import contextlib
import os
import time
from pathlib import Path

import psutil

HOOK = Path(__file__).with_name("hook")
SECONDS = 600
"""How long a script may take to come to its place. It is never waited for in vain but by a test that fails."""


class Hold:
    """Places where scripts with `environment` wait until they are released or killed, or get a signal that they handle."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HOLD": str(folder)}

    def at(self, script: str, module: str, function: str, call: int = 1) -> None:
        """Let each process of `script` wait before its `call`-th call of a function."""
        (self.folder / f"{script}.at").write_text(f"{module} {function} {call}")

    def held(self, script: str, count: int = 1) -> list[psutil.Process]:
        """The processes of `script` that live and have come to its place, once there are `count`."""
        deadline = time.monotonic() + SECONDS
        while len(found := self._living(script)) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} processes of {script} wait after {SECONDS} s"
            time.sleep(0.05)
        return found

    def _living(self, script: str) -> list[psutil.Process]:
        found = []
        for path in self.folder.glob(f"{script}.*"):
            if path.suffix != ".at":
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(int(path.suffix[1:])))
        return found

    def release(self, script: str) -> None:
        """Let those that wait go on, and others pass."""
        (self.folder / f"{script}.at").unlink()

    def release_all(self) -> None:
        """Leave nobody waiting."""
        for path in self.folder.glob("*.at"):
            path.unlink()
