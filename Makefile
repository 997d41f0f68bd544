# On a machine with Python 3.11 or newer, git and make, every target here installs what it needs into .venv.
#
#   make chat [MODEL=DIR] [ARGS="--vram-limit 4GB"]   talk to the demo model, a checkpoint or a store
#   make test [ARGS="-k planes"]                    run the tests
#   make check                                      format, lint, types, imports and tests
#   make install                                    only .venv and the edgemoe command in it

VENV := .venv
PYTHON := $(VENV)/bin/python
# Twice quiet: errors only.
PIP := $(PYTHON) -m pip --quiet --quiet --disable-pip-version-check

# Installed where no NVIDIA driver answers: the version that the CPU kernels are tested with. With a driver,
# torch is left to edgemoe's own dependencies, which bring its CUDA libraries.
TORCH := torch==2.13.0

CANDIDATES := python3 python3.12 python3.11 python3.13 python3.14

KERNELS := $(wildcard edgemoe/kernels/native/csrc/*.[ch] edgemoe/kernels/native/csrc/*/*.[ch])

.PHONY: chat test check install

chat: $(VENV)/.installed
	@$(PYTHON) -m edgemoe chat $(if $(MODEL),--model "$(MODEL)") $(ARGS)

test: $(VENV)/.installed-dev
	$(PYTHON) -m pytest $(ARGS)

check: $(VENV)/.installed-dev
	@tools/check

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml Makefile $(KERNELS)
	$(create-venv)
	$(install-torch)
	$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml Makefile $(KERNELS)
	$(create-venv)
	$(install-torch)
	$(PIP) install --editable '.[dev]'
	@touch $(VENV)/.installed $@

# An interpreter may be a shim that answers nothing, so each candidate is asked rather than looked for.
# A .venv whose interpreter has gone is made anew.
define create-venv
@$(PYTHON) -c '' 2>/dev/null && exit 0; \
for python in $(CANDIDATES); do \
    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
        echo "Creating $(VENV) with $$($$python --version) ($$python)"; \
        $$python -m venv --clear $(VENV); exit; \
    fi; \
done; \
echo "Python 3.11 or newer was wanted, under one of the names: $(CANDIDATES). Found:" >&2; \
for python in $(CANDIDATES); do \
    echo "  $$python: $$($$python --version 2>/dev/null || echo none)" >&2; \
done; \
echo "Install Python 3.11 or newer so that one of these names starts it, then run make again." >&2; \
exit 2
endef

define install-torch
@echo "Installing into $(VENV); the first time this downloads some hundred megabytes"; \
if [ -e /proc/driver/nvidia/version ] || nvidia-smi >/dev/null 2>&1; then \
    echo "An NVIDIA driver is here: torch with CUDA comes with edgemoe's dependencies"; \
else \
    $(PIP) install $(TORCH); \
fi
endef
