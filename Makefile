# make train   a fresh machine to a trained policy: PPO on CartPole-v1 through HTSCollector
# make test    the tests, in parallel
# make test-others  the same with the oldest and the newest torch that have been tried, in virtual
#              environments of their own; by hand before a release (docs/installation.md: results)
# make docs    the documentation site, in docs/_build; a warning is an error. INTERSPHINX=1 adds links
#              to the documentation of torch, torchrl and others, and needs the network
# make check   format, lint, types, documentation, tests: run it before each commit; CI runs the same
# make format  put the sources into the house format
# make bench   steps per second against TorchRL's collectors
# make dist    the source distribution and the wheel, in dist/
# make contenders  an environment with all that the benchmark can compare with: .venv-contenders
# make football  install the engine of Google Research Football, built once (docs/results/football.md)
#
# Each makes a virtual environment first, where it is missing or out of date.
#   VENV=path       use this environment; in an existing one torch becomes the pinned version,
#                   unless TORCH names another
#   PYTHON=python3  the interpreter that a new environment is made with
#   TORCH=torch     what to install as torch: 'torch==2.13.0+cu130', a wheel, ...; by default the
#                   pinned version, in the build that pip's own settings lead to
#   JOBS=auto       how many tests to run at a time
#   ARGS=           further options for the recipe, the tests or the benchmark

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch
JOBS ?= auto
ARGS ?=

RUN := $(VENV)/bin/python
STAMP := $(VENV)/.torchrl_hts-installed
TEST_STAMP := $(VENV)/.torchrl_hts-tests-installed
DOCS_STAMP := $(VENV)/.torchrl_hts-docs-installed
CONSTRAINTS := requirements/constraints.txt

# Beside the pinned one: the ends of what has been tried of the range in pyproject.toml.
OTHER_TORCHES := 2.11.0 2.14.1

POSIX_TESTS := $(addprefix tests/,processes/test_fork_server.py processes/test_server_pool.py \
    processes/test_portability.py \
    planning/test_boundaries.py collector/test_hosts.py collector/test_notebooks.py \
    collector/test_collector_faults.py collector/test_collector_ends.py)

.PHONY: train test test-others check format-check lint types docs format bench dist contenders \
    football venv

train: $(STAMP)
	$(RUN) recipes/ppo_cartpole.py --require-return 475 $(ARGS)

test: $(TEST_STAMP)
	$(RUN) -m pytest -n $(JOBS) --dist worksteal $(ARGS)
	@# Once more without what Linux offers beyond POSIX, as on macOS.
	TORCHRL_HTS_POSIX_ONLY=1 $(RUN) -m pytest -n $(JOBS) --dist worksteal $(POSIX_TESTS)

test-others: $(addprefix test-torch-,$(OTHER_TORCHES))

test-torch-%:
	$(MAKE) test VENV=.venv-torch-$* TORCH=torch==$*

check: format-check lint types docs test

format-check: $(STAMP)
	$(RUN) -m ruff format --check .

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(VENV)/bin/lint-imports --no-cache --no-logo

types: $(STAMP)
	$(RUN) -m mypy

docs: $(DOCS_STAMP)
	$(RUN) docs/sentences.py README.md CHANGELOG.md docs recipes torchrl_hts benchmarks tests
	$(RUN) -m sphinx --quiet --fail-on-warning --keep-going docs docs/_build

format: $(STAMP)
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

bench: $(STAMP)
	$(RUN) benchmarks/throughput.py $(ARGS)

dist: $(STAMP)
	$(RUN) requirements/dist.py dist

# Sample Factory and PufferLib ask for other versions of what all others need, and run with theirs but
# for numpy.
contenders:
	$(MAKE) venv VENV=.venv-contenders
	.venv-contenders/bin/python -m pip install --quiet \
	    --constraint .venv-contenders/constraints.txt --editable '.[envpool,sb3]'
	.venv-contenders/bin/python -m pip install --quiet --no-deps -r requirements/contenders.txt

football: $(STAMP)
	requirements/football.sh $(RUN)

venv: $(STAMP)

# A torch of the caller's own choice must not meet the pin of the default one.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "error: '$(PYTHON)' is missing or older than Python 3.10;" \
	        "name another: make PYTHON=python3.11" >&2; exit 1; }
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "error: $(PYTHON) can't make a virtual environment;" \
	        "on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@if [ "$(TORCH)" = torch ]; then cat $(CONSTRAINTS); \
	    else grep -v '^torch==' $(CONSTRAINTS); fi >$(VENV)/constraints.txt
	$(RUN) -m pip install --quiet --constraint $(VENV)/constraints.txt \
	    '$(TORCH)' --editable '.[atari,hydra,minatar,optuna,recipes,tensorboard,video,wandb,dev]'
	@touch $@

# What tests alone need, which is large: EnvPool for football without building gfootball, MuJoCo and
# VMAS. Ray is larger still: its tests are run by hand, and skipped where it isn't installed.
$(TEST_STAMP): $(STAMP)
	$(RUN) -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[envpool,mujoco,vmas]'
	@touch $@

# What the documentation alone needs.
$(DOCS_STAMP): $(STAMP)
	$(RUN) -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[docs]'
	@touch $@
