"""Print this machine's GPUs as the pipeline sees them: memory, the jobs that lease them, and foreign processes."""

import sys

from draftline.errors import DraftlineError

if __name__ == "__main__":
    from draftline.gpu_table import show

    try:
        show()
    except DraftlineError as error:
        sys.exit(f"gpus: {error}")
