"""Identity of what comes from outside: target, prompt files, evaluation sets. Cheap enough to be asked at every start.

What is not at hand yet counts as absent, so that a plan can be drawn before target or prompts arrive.
"""

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftline.digests import CODE, sampled_digest
from draftline.settings import file_digest

DIGESTS = Path("results/.resume/digests")
"""Where digests of source files are remembered."""
ABSENT = "absent"
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


def locate(path: str, workflow: Path) -> Path:
    """A path of the config: as it stands in the working directory, else beside the workflow."""
    here = Path(path)
    return here if here.is_absolute() or here.exists() else workflow / path


def prompts(sources: Mapping[str, Any], workflow: Path, cache: Path) -> dict[str, str]:
    """SHA-256 of each prompt file, by source and file name."""
    found = {}
    for name, source in sources.items():
        for number, path in enumerate(prompt_files(source["paths"], workflow)):
            found[f"{name}/{number}/{path.name}"] = file_digest(path, cache) if path.is_file() else ABSENT
    return found


def prompt_files(paths: str | list[str], workflow: Path) -> list[Path]:
    """Files of a source: each path, with ``*`` expanded and sorted, in the working directory, else beside the workflow.

    A path that matches nothing is given as it stands.
    """
    found: list[Path] = []
    for pattern in [paths] if isinstance(paths, str) else paths:
        here, there = (sorted(root / name for name in glob.glob(pattern, root_dir=root)) for root in (Path(), workflow))
        found += here or there or [Path(pattern)]
    return found


def bench(bench: Mapping[str, Any], workflow: Path, cache: Path) -> dict[str, str]:
    """SHA-256 of an evaluation set's file; a package is pinned by its own in the config."""
    if "path" not in bench:
        return {}
    path = locate(bench["path"], workflow)
    return {path.name: file_digest(path, cache) if path.is_file() else ABSENT}


def target(target: Mapping[str, Any], workflow: Path, cache: Path) -> dict[str, str]:
    """What identifies the target's files: small files, trusted code and GGUF whole, safetensors shards by size, header and samples.

    Hub ids and packages are pinned by revision and SHA-256 in the config.
    """
    found = {}
    if "path" in target:
        folder = locate(target["path"], workflow)
        # Code that is not run changes nothing.
        patterns = (*SMALL_FILES, CODE) if target["trust_remote_code"] else SMALL_FILES
        files = sorted(path for pattern in patterns for path in folder.glob(pattern))
        found.update({path.name: file_digest(path, cache) for path in files})
        found.update({path.name: sampled_digest(path) for path in sorted(folder.glob("*.safetensors"))})
        found = found or {"target": ABSENT}
    if "gguf" in target:
        path = locate(target["gguf"], workflow)
        found[path.name] = file_digest(path, cache) if path.is_file() else ABSENT
    if "tiny" in target:
        found["merges"] = file_digest(workflow / "resources" / "tiny" / "merges.txt", cache)
    if target.get("chat_template"):
        path = locate(target["chat_template"], workflow)
        found["chat_template"] = file_digest(path, cache) if path.is_file() else ABSENT
    return found
