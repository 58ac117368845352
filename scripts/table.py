"""Print the table of accepted lengths of the last finished run, from results/report.html and results/evaluation/."""

import sys

from draftline.errors import DraftlineError

if __name__ == "__main__":
    from draftline.table import show

    try:
        show("results/report.html")
    except DraftlineError as error:
        sys.exit(f"table: {error}")
