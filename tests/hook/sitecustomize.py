"""Loaded at its start by each Python that has this folder in PYTHONPATH: makes a script wait, as tests/hold.py says."""

import functools
import importlib.abc
import importlib.util
import os
import select
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

SCRIPT = Path(sys.argv[0]).stem
AT = Path(os.environ["HOLD"]) / f"{SCRIPT}.at"


class Finder(importlib.abc.MetaPathFinder):
    """Wraps the function as soon as its module is loaded, before anybody has taken it from there."""

    def __init__(self, module: str, function: str, call: int) -> None:
        self.module, self.function, self.call = module, function, call

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec
        assert spec.loader
        load = spec.loader.exec_module

        def load_and_wrap(module: ModuleType) -> None:
            load(module)
            *owner, own_name = self.function.split(".")
            place = functools.reduce(getattr, owner, module)
            setattr(place, own_name, waiting(getattr(place, own_name), self.call))

        spec.loader.exec_module = load_and_wrap
        return spec


def waiting(function, call: int):
    """The function, whose call of that number waits until AT is gone, or until a signal is handled."""
    count = 0

    @functools.wraps(function)
    def wait(*arguments, **named):
        nonlocal count
        count += 1
        if count == call:
            told, teller = os.pipe()
            os.set_blocking(teller, False)
            before = signal.set_wakeup_fd(teller)
            AT.with_name(f"{SCRIPT}.{os.getpid()}").touch()
            while AT.exists() and not select.select([told], [], [], 0.05)[0]:
                pass
            signal.set_wakeup_fd(before)
        return function(*arguments, **named)

    return wait


if AT.exists():
    module, function, call = AT.read_text().split()
    sys.meta_path.insert(0, Finder(module, function, int(call)))
