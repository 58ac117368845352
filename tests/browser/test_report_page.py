"""The report in a real browser: it draws, complains of nothing and asks nobody for anything."""

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

import report_artifacts as made
from draftline.report import page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        inputs, config = made.make_run(made.Run(shards=1))
        record = made.record("report", "results/report.html", inputs.all())
        page.make_report(inputs, config, record, "results/report.html")
    return folder / "results" / "report.html"


def browse(folder: Path, report: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", *options, report.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def test_dom_has_every_section_and_its_charts(report: Path, tmp_path: Path) -> None:
    done = browse(tmp_path, report, "--dump-dom", "--enable-logging=stderr")
    dom = done.stdout
    # Charts that a section must hold: tau by set, two ways by set, slots by set, three curves, one histogram a source and axis.
    for section, charts in {
        "results": 2,
        "checkpoints": 4,
        "positions": 2,
        "training": 3,
        "data": 4,
        "runs": 1,
    }.items():
        part = re.search(rf'<section id="{section}">.*?</section>', dom, re.DOTALL)
        assert part is not None, section
        assert len(re.findall(r'<svg [^>]*role="img"', part[0])) >= charts, section
    assert "CONSOLE" not in done.stderr
    assert '"id":' in re.search(r'id="draftline">(.*?)</script>', dom)[1]  # type: ignore[index]


def measured(folder: Path, report: Path, expression: str, *options: str) -> str:
    """Value of a JavaScript expression in the loaded page."""
    probe = folder / "probe.html"
    script = f"<script>onload = () => {{ document.title = 'probe:' + ({expression}) }}</script></html>"
    probe.write_text(report.read_text(encoding="utf-8").replace("</html>", script), encoding="utf-8")
    found = re.search(r"<title>probe:(.*?)</title>", browse(folder, probe, "--dump-dom", *options).stdout)
    assert found is not None
    return found[1]


def test_it_asks_for_no_other_resource(report: Path, tmp_path: Path) -> None:
    assert measured(tmp_path, report, "performance.getEntriesByType('resource').map(entry => entry.name)") == ""


@pytest.mark.parametrize("width", [1280, 520])
def test_it_draws_and_is_not_wider_than_its_window(report: Path, tmp_path: Path, width: int) -> None:
    sizes = measured(
        tmp_path, report, "document.documentElement.scrollWidth + ' ' + innerWidth", f"--window-size={width},900"
    )
    wide, window = map(int, sizes.split())
    assert wide <= window
    picture = tmp_path / "report.png"
    browse(tmp_path, report, f"--screenshot={picture}", f"--window-size={width},900")
    found = picture.read_bytes()
    assert struct.unpack(">II", found[16:24]) == (width, 900)
    assert len(found) > 20_000  # An empty page of this size compresses to a few kB.
