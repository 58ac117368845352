"""The code fingerprint follows statements, not text, and only of modules that a command imports."""

import shutil
import subprocess

import pytest

from draftline import fingerprint as module

LOSS = '"""Loss."""\n\nfrom draftline.base import scale\n\n\ndef loss(x):\n    """Doc."""\n    return scale(x)  # why\n'


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    package = tmp_path / "draftline"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text("def scale(x):\n    return 2 * x\n")
    (package / "loss.py").write_text(LOSS)
    (package / "other.py").write_text("VALUE = 1\n")
    (package / "cli.py").write_text("import draftline.other\n")
    (tmp_path / "train.py").write_text(
        "from draftline.cli import Command\n\ndef work():\n    from draftline.loss import loss\n"
    )
    (tmp_path / "report.py").write_text("from draftline import other\n")
    monkeypatch.setattr(module, "SCRIPTS", tmp_path)
    return tmp_path


def test_comments_docstrings_and_format_change_nothing(scripts):
    before = module.fingerprint("train")
    (scripts / "draftline" / "loss.py").write_text(
        LOSS.replace("# why", "# because").replace("Doc.", "Docs.").replace("Loss.", "Losses.").replace("2 * x", "2*x")
    )
    assert module.fingerprint("train") == before


@pytest.mark.parametrize("name", ["loss", "base"])
def test_a_statement_in_an_imported_module_changes_it(scripts, name):
    before = module.fingerprint("train")
    path = scripts / "draftline" / f"{name}.py"
    path.write_text(path.read_text() + "EXTRA = 1\n")
    assert module.fingerprint("train") != before


def test_modules_that_are_not_imported_do_not_count(scripts):
    before = module.fingerprint("train"), module.fingerprint("report")
    (scripts / "draftline" / "loss.py").write_text("def loss(x):\n    return 0\n")
    after = module.fingerprint("train"), module.fingerprint("report")
    assert after[0] != before[0]
    assert after[1] == before[1]


def test_plumbing_is_outside_with_what_only_it_imports(scripts):
    before = module.fingerprint("train")
    (scripts / "draftline" / "cli.py").write_text("import draftline.other\nVALUE = 2\n")
    (scripts / "draftline" / "other.py").write_text("VALUE = 2\n")
    (scripts / "train.py").write_text((scripts / "train.py").read_text() + "VALUE = 3\n")
    assert module.fingerprint("train") == before


def test_relative_imports_are_followed(scripts):
    (scripts / "draftline" / "loss.py").write_text("from .base import scale\n")
    before = module.fingerprint("train")
    (scripts / "draftline" / "base.py").write_text("def scale(x):\n    return 3 * x\n")
    assert module.fingerprint("train") != before


def test_every_command_of_the_project_has_one():
    commands = [path.stem for path in module.SCRIPTS.glob("*.py")]
    assert commands
    assert all(len(module.fingerprint(command)) == 16 for command in commands)


@pytest.mark.parametrize(
    ("command", "changed"),
    [
        ("completions", "sources"),  # how source files are found
        ("hidden_states", "sources"),
        ("train_segment", "states_writer"),  # how hidden states are written
        ("train_segment", "host_copies"),
    ],
)
def test_code_that_serves_other_stages_makes_no_gpu_work_stale(tmp_path, monkeypatch, command, changed):
    shutil.copytree(module.SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(module, "SCRIPTS", tmp_path / "scripts")
    before = module.fingerprint(command)
    path = tmp_path / "scripts" / "draftline" / f"{changed}.py"
    path.write_text(path.read_text() + "EXTRA = 1\n")
    assert module.fingerprint(command) == before


@pytest.mark.parametrize("python", ["python3.11", "python3.12", "python3.13", "python3.14"])
def test_every_version_of_python_gives_the_same(python):
    """A job's interpreter may be newer than that of the run that planned it."""
    ask = (
        f"import sys; sys.path.insert(0, {str(module.SCRIPTS)!r}); from draftline.fingerprint import fingerprint; "
        "print(sys.version_info[:2], fingerprint('tokens'), fingerprint('train_segment'))"
    )
    found = shutil.which(python)
    done = subprocess.run([found, "-c", ask], capture_output=True, text=True) if found else None
    if done is None or not done.stdout:
        pytest.skip(f"{python} does not run here")
    assert done.stdout.split(") ")[1].split() == [module.fingerprint("tokens"), module.fingerprint("train_segment")]
