"""No service is stopped for a dry run, however Snakemake is asked for one."""

import pytest
from snakemake.cli import get_argument_parser

from draftline.maintenance import DRY_RUN

WORDS = [
    "-n",
    "-np",
    "-pn",
    "-kpn",
    "-Fnp",
    "--dry-run",
    "--dryrun",
    "-p",
    "-F",
    "-k",
    "--nolock",
    "--notemp",
    "--nocolor",
]


@pytest.mark.parametrize("word", WORDS)
def test_a_dry_run_is_seen_as_snakemake_sees_it(word):
    assert bool(DRY_RUN.match(word)) == get_argument_parser().parse_args([word]).dryrun
