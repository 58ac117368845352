# make run     everything config.yaml asks for, then the table of accepted lengths
# make test    the tests
# make check   format, lint and types
# make report  the report, and its path
# make gpus    this machine's GPUs, and who holds them
# make window  the GPU jobs in a maintenance window of the config's service (docs/maintenance.md)
# make env-sglang  .venv-sglang, the environment of engine sglang's server (docs/engines.md)
# make unstage the copies of models below FOLDER, the config's target.stage_to, unless a job uses them
# make clean   the environments; results/ stays
#
# ARGS goes to Snakemake: make run ARGS="--configfile presets/qwen3-8b.yaml"

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
ARGS ?=

# A stamp's name holds its requirements' checksum: an edit installs again, a touch does not.
sum = $(shell cat $(1) | cksum | tr ' ' '-')
CPU := .venv/cpu-$(call sum,envs/cpu.txt envs/constraints.txt)
SGLANG := .venv-sglang/made-$(call sum,envs/sglang.txt envs/sglang-constraints.txt)
TEST := .venv/test-$(call sum,envs/cpu.txt envs/test.txt envs/constraints.txt)

.PHONY: run report gpus window env-sglang unstage test check clean

run: $(CPU)
	@$(BIN)/python scripts/unlock.py
	@$(BIN)/snakemake $(ARGS)
	@$(BIN)/python scripts/table.py

report: $(CPU)
	@$(BIN)/python scripts/unlock.py
	@$(BIN)/snakemake results/report.html $(ARGS)
	@echo "$(CURDIR)/results/report.html"

gpus: $(CPU)
	@$(BIN)/python scripts/gpus.py

window: $(CPU)
	@$(BIN)/python scripts/maintenance.py -- $(ARGS)

env-sglang: $(SGLANG)

unstage: $(CPU)
	@$(BIN)/python scripts/unstage.py "$(FOLDER)"

test: $(TEST)
	# Two processes, a file each: tests use one thread.
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(TEST)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/snakemake --lint
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-sglang

$(CPU):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Draftline needs Python 3.11 or newer; name one: make run PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv
	# torch's own index has the build without CUDA, a tenth of the size; where it is out of reach, PyPI's build does.
	$(BIN)/python -m pip install --quiet --retries 1 --no-deps "$$(grep '^torch==' envs/cpu.txt)" \
		--extra-index-url https://download.pytorch.org/whl/cpu
	$(BIN)/python -m pip install --quiet -r envs/cpu.txt
	@rm -f .venv/cpu-*
	@touch $@

$(SGLANG):
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet -r envs/sglang.txt
	@rm -f .venv-sglang/made-*
	@touch $@

$(TEST): $(CPU)
	$(BIN)/python -m pip install --quiet -r envs/test.txt
	@rm -f .venv/test-*
	@touch $@
