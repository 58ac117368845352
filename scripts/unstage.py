"""Remove the copies of target models below a folder, the config's target.stage_to. Refuses while a job uses one."""

import sys

from draftline.errors import DraftlineError

if __name__ == "__main__":
    from draftline.staging import unstage

    if len(sys.argv) != 2 or not sys.argv[1]:
        sys.exit("unstage: name one folder, the config's target.stage_to: scripts/unstage.py /dev/shm/draftline")
    try:
        removed = unstage(sys.argv[1])
    except DraftlineError as error:
        sys.exit(f"unstage: {error}")
    except OSError as error:
        sys.exit(f"unstage: {error.filename}: {error.strerror}")
    print("\n".join(f"removed {copy}" for copy in removed) or f"{sys.argv[1]}: no copies")
