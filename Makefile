# The two that everybody needs are in README.md; these are for people who change the code.
PYTHON ?= .venv/bin/python

.PHONY: venv format lint types unit test check sizes

venv:
	python3 -m venv .venv
	$(PYTHON) -m pip install -q -c constraints.txt torch -e '.[dev]'

format:
	$(PYTHON) -m ruff format src tests benchmarks

lint:
	$(PYTHON) -m ruff format --check src tests benchmarks
	$(PYTHON) -m ruff check src tests benchmarks

types:
	$(PYTHON) -m mypy

# No process is started: under a minute.
unit:
	$(PYTHON) -m pytest -n 2 -q tests/unit

test:
	$(PYTHON) -m pytest -n 3 -q

sizes:
	$(PYTHON) benchmarks/sizes.py

check: lint types test sizes

.PHONY: zoo
# The tests that take long or need a quiet machine (marker zoo; listed in docs/reliability.md), two files at a time: 50 minutes.
zoo:
	LAMP_ZOO_FULL=1 $(PYTHON) -m pytest -n 2 --dist loadfile -q tests -m zoo

# Each prints its tables; a peer is installed into .bench-venv at its first use. It takes long: an hour or more on two cores.
BENCHES := starting batches tokenising generation training first_step saving packing finetune prepare watching attending growth plan looking

.PHONY: bench
bench:
	@set -e; for name in $(BENCHES); do echo; echo "== $$name"; $(PYTHON) benchmarks/$$name.py; done

.PHONY: readme pictures docs wheel
# Figures from benchmarks/results; a benchmark writes its own with --json benchmarks/results/NAME.json.
readme:
	$(PYTHON) benchmarks/readme.py --plans

# The two recordings at the top of the README, and the page in a browser.
pictures:
	$(PYTHON) benchmarks/recording.py hang docs/hang.svg
	$(PYTHON) benchmarks/recording.py kill docs/kill.svg
	$(PYTHON) benchmarks/screenshots.py

docs:
	$(PYTHON) -m mkdocs build

wheel:
	$(PYTHON) -m build
