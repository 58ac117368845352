"""Write what a run of Snakemake would start: `planned.py FILE OPTIONS`, the options being Snakemake's, a dry run's.

FILE gets a JSON object a line: a job with its rule, inputs and outputs, each after those that it needs; at the end the
resolved config.
"""

import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import IO

from draftline.settings import RUN_FILE


class Jobs(logging.Filter):
    """Takes the jobs out of what Snakemake logs."""

    def __init__(self, file: IO[str]) -> None:
        super().__init__()
        self.file = file

    def filter(self, record: logging.LogRecord) -> bool:
        """Write a job's record; let only complaints pass."""
        if getattr(record, "event", None) == "job_info":
            job = {"rule": record.rule_name, "inputs": _plain(record.input), "outputs": _plain(record.output)}
            self.file.write(json.dumps(job) + "\n")
        return record.levelno >= logging.WARNING


def _plain(paths: list[str]) -> list[str]:
    """Paths without the flags that Snakemake shows behind them: ` (temp)`, ` (ancient)`."""
    return [re.sub(r"( \([^)]*\))+$", "", path) for path in paths]


def main(path: str, options: list[str]) -> None:
    """Run Snakemake in this process and write what it says."""
    sys.path.pop(0)  # A command named like a library would be taken for it.
    from snakemake.cli import main as snakemake
    from snakemake.logging import logger

    with open(path, "w", encoding="utf-8") as file:
        logger.addFilter(Jobs(file))
        try:
            snakemake(options)
        finally:
            run = os.environ.get(RUN_FILE)  # Set by the plan.
            if run:
                file.write(json.dumps(json.loads(Path(run).read_text(encoding="utf-8"))["config"]) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
