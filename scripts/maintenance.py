"""Stop a service, run the GPU jobs that need its room, and start it again whatever happened (docs/maintenance.md).

    .venv/bin/python scripts/maintenance.py [TARGET ...] [-- SNAKEMAKE OPTIONS]

The config's `maintenance` gives the commands. What the window's jobs need is made first, while the service is up; if none
of them is pending, it is not stopped at all. Exit status 1 after a failure, 128 and the signal's number after a signal.
"""

import argparse
import contextlib
import sys

from draftline.errors import DraftlineError
from draftline.maintenance import Interrupted, maintain


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/maintenance.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="artifacts to make; default: all")
    parser.add_argument(
        "--restore", action="store_true", help="only start the service again that a killed window stopped"
    )
    own, snakemake = (sys.argv[1:], [])
    if "--" in own:
        own, snakemake = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    try:
        maintain(options.targets, snakemake, options.restore)
    except (DraftlineError, Interrupted, OSError) as error:
        with contextlib.suppress(OSError):
            print(f"maintenance: {error}", file=sys.stderr)
            if isinstance(error.__context__, DraftlineError | Interrupted):  # Where the way back failed as well.
                print(f"before that: {error.__context__}", file=sys.stderr)
        sys.exit(128 + error.number if isinstance(error, Interrupted) else 1)


if __name__ == "__main__":
    main()
