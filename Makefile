# make conformance   set up, then hold the installed quantizers to the oracle (the main job)
# make test          set up, then lint, type-check and run the tests
# make exhaustive    all 2^32 float32 inputs through both codecs, every bfloat16 block, every stochastic threshold (about 15 minutes)
# make release       build the wheel and the sdist, install the wheel alone in an environment of its own, and use it
# make docs          the documentation as a site, in build/site; warnings fail
# make studies       compute the pages of docs/studies again, figures and all
# make bench         speed against the other implementations, on one core
# make clean         remove the environment and every cache
#
# PYTHON=python3.12  another interpreter (3.11 or newer)       VENV=path    another environment
# EXTRAS=cuda-headers  fewer optional packages for the conformance run
# ARGS="--json report.json"  further arguments of the nvfp4 or pytest command

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= cuda-headers,te,jax,peers,safetensors
ARGS ?=

BIN := $(VENV)/bin
# A stamp is named after what it installed, so that a changed setup.cfg installs again and nothing else does.
KEY := $(shell cat setup.cfg pyproject.toml | cksum | cut -d ' ' -f 1)
COMMA := ,
ALL_STAMP := $(VENV)/.installed-$(KEY)-all
RUN_STAMP := $(or $(wildcard $(ALL_STAMP)),$(VENV)/.installed-$(KEY)-$(subst $(COMMA),+,$(EXTRAS)))

.PHONY: conformance test exhaustive release docs probes studies bench clean

conformance: $(RUN_STAMP)
	$(BIN)/nvfp4 conformance run --suite quick $(ARGS)

test: $(ALL_STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy --strict nvfp4ref
	$(BIN)/mypy
	$(BIN)/pytest -n auto --dist loadfile --cov --cov-fail-under=98 $(ARGS)

exhaustive: $(RUN_STAMP)
	$(BIN)/nvfp4 conformance run --suite exhaustive $(ARGS)
	$(BIN)/python -m conformance.sweep_stochastic

# The wheel is built from the sdist, so that both are tried.
release: $(ALL_STAMP)
	rm -rf dist build $(VENV)-release
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv $(VENV)-release
	$(VENV)-release/bin/python -m pip install -q --disable-pip-version-check dist/*.whl
	cd dist && ../$(VENV)-release/bin/python ../tests/installed.py

docs: $(ALL_STAMP)
	$(BIN)/sphinx-build -q -W --keep-going -d build/doctrees -c docs . build/site

# each probe must compile for every architecture that has its instructions; needs nvcc
probes: $(ALL_STAMP)
	$(BIN)/python -m nvfp4hw.probes compile

studies: $(ALL_STAMP)
	for page in published gemm amax witnesses; do $(BIN)/python docs/studies/$$page.py --write || exit 1; done

bench: $(ALL_STAMP)
	$(BIN)/python benchmarks/quantize.py $(ARGS)
	$(BIN)/python benchmarks/stochastic.py
	$(BIN)/python benchmarks/gemm.py
	$(BIN)/python benchmarks/jax_quantize.py

clean:
	rm -rf $(VENV) $(VENV)-release build dist *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; \
	    sys.exit(0 if sys.version_info >= (3, 11) else f"nvfp4ref needs Python 3.11 or newer, and $(PYTHON) is {v}: say make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-$(KEY)-%: | $(BIN)/pip
	$(BIN)/python -m pip install -q --disable-pip-version-check -e ".[$(subst +,$(COMMA),$*)]"
# qwantize asks for Triton, 300 MB that only its GPU kernels use
	$(if $(filter peers all,$(subst +, ,$*)),$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps qwantize==0.1.1)
	@touch $@
