# Every target installs what it needs into .venv. The machine needs Python 3.11 or newer, git and make.
#
#   make help                                          print this list; so does make alone
#   make chat [MODEL=DIR] [ARGS="--vram-limit 4GB"]    talk to the demo model, a checkpoint or a store
#   make serve [MODEL=DIR] [ARGS="--port 8000"]        serve it over HTTP, for clients of OpenAI, Anthropic and ollama
#   make test [ARGS="-k planes"]                       run all tests but those of the slow lane
#   make test-fast [ARGS="-x"]                         run the tests that need no other process, whole model or GPU
#   make test-folders [ARGS="-k qwen3_5"]              run the slow lane: every family in every setting, compiled kernels, mutated configs
#   make test-lowest [ARGS="-x"]                       run all tests with the lowest versions that pyproject.toml allows
#   make check                                         format, lint, types and make test
#   make install [TORCH_BUILD=cpu|cuda]                make only .venv with the edgemoe command
#   make dist [ARGS="--architectures x86_64"]          build a release in dist/: an sdist, and wheels with the compiled kernel

VENV := .venv
PYTHON = $(VENV)/bin/python
# --quiet twice: pip prints errors only.
PIP = $(PYTHON) -m pip --quiet --quiet --disable-pip-version-check

# torch's build: cpu, cuda, or auto, which is cuda where there is an NVIDIA driver.
TORCH_BUILD ?= auto

# Three processes for two cores: one computes while others wait for a server, a disk or a limit in seconds. Fast tests
# do not wait: two processes run them sooner, as each takes five seconds to import and collect.
# ARGS="-n 0" runs one process. Each takes a third in the order of the files, so that a fixture of a module is made once,
# and then steals from the others.
TESTS = $(PYTHON) -m pytest -n 3 --dist worksteal

CANDIDATES := python3 python3.12 python3.11 python3.13 python3.14

# Ctrl-C ends a chat with 130, which is no error of make's.
or-interrupted = || { code=$$?; [ $$code -eq 130 ] || exit $$code; }

KERNELS := $(wildcard edgemoe/kernels/native/csrc/*.[ch] edgemoe/kernels/native/csrc/*/*.[ch])

.PHONY: help chat serve test test-fast test-folders test-lowest check install dist

# The first target, for make alone. The list is the comment at the top of this file.
help:
	@sed -n 's/^#   make/make/p' $(firstword $(MAKEFILE_LIST))

chat: $(VENV)/.installed
	@$(PYTHON) -m edgemoe chat $(if $(MODEL),--model "$(MODEL)") $(ARGS) $(or-interrupted)

serve: $(VENV)/.installed
	@$(PYTHON) -m edgemoe serve $(if $(MODEL),--model "$(MODEL)") $(ARGS) $(or-interrupted)

test: $(VENV)/.installed-dev
	$(TESTS) $(ARGS)

test-fast: $(VENV)/.installed-dev
	$(PYTHON) -m pytest -n 2 --dist worksteal -m "not e2e and not gpu and not triton and not folders" $(ARGS)

test-folders: $(VENV)/.installed-dev
	$(TESTS) -m folders $(ARGS)

test-lowest .venv-lowest/.installed: VENV := .venv-lowest
test-lowest: .venv-lowest/.installed
	$(TESTS) $(ARGS)

check: $(VENV)/.installed-dev
	@tools/check

install: $(VENV)/.installed

dist: $(VENV)/.installed
	$(PIP) install --editable '.[dist]'
	@$(PYTHON) -m tools.dist $(ARGS)

$(VENV)/.installed: pyproject.toml Makefile $(KERNELS)
	$(create-venv)
	$(install-torch)
	$(PIP) install --editable '.[serve]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml Makefile $(KERNELS)
	$(create-venv)
	$(install-torch)
	$(PIP) install --editable '.[dev]'
	@touch $(VENV)/.installed $@

# pip always takes the newest versions; uv has a resolution to the lowest ones. torch is a build for CUDA here, as
# the registry has no other of its lowest version: 7 GB on disk with its libraries.
.venv-lowest/.installed: pyproject.toml Makefile $(KERNELS)
	@rm -rf .venv-lowest
	$(create-venv)
	@echo "Installing the lowest versions into $(VENV); the first time this downloads several gigabytes"
	$(PIP) install uv
	@$(VENV)/bin/uv pip install --quiet --python $(PYTHON) --resolution lowest-direct --editable '.[dev]'
	@touch $@

# Every candidate is started, not only looked up: an interpreter on the path may be a shim that starts none.
# A .venv whose interpreter no longer starts is replaced.
define create-venv
@$(PYTHON) -c '' 2>/dev/null && exit 0; \
for python in $(CANDIDATES); do \
    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
        echo "Creating $(VENV) with $$($$python --version) ($$python)"; \
        $$python -m venv --clear $(VENV); exit; \
    fi; \
done; \
echo "make: expected Python 3.11 or newer under one of the names $(CANDIDATES), got:" >&2; \
for python in $(CANDIDATES); do \
    echo "  $$python: $$($$python --version 2>/dev/null || echo none)" >&2; \
done; \
echo "Install Python 3.11 or newer under one of these names, then run make again." >&2; \
exit 2
endef

define install-torch
@torch=$$($(PYTHON) tools/torch_build.py $(TORCH_BUILD)) && if [ -n "$$torch" ]; then $(PIP) install $$torch; fi
endef
