# Everything a clone needs is made here: `make demo` and `make test` set themselves up in .venv, by package name, with pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := CMakeLists.txt pyproject.toml examples/per_dqn.py $(shell find core bindings src -type f -not -name '*.pyc')
CPP_BUILD := build/cpp
CORPUS := $(CURDIR)/tests/fuzz/corpus
CPP_FILES := $(shell find core bindings tests/cpp tests/crash tests/fuzz benchmarks examples -name '*.h' -o -name '*.cpp' -o -name '*.inc')
PY_PLACES := src tests benchmarks examples

.DEFAULT_GOAL := help
.PHONY: help demo test test-python test-cpp test-aarch64 compat check format bench soak clean

help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# torch is pinned, and installed before anything that could ask for another one.
$(BIN)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	@touch $@

$(BIN)/.demo: $(BIN)/.torch $(SOURCES)
	$(BIN)/pip install --quiet ".[demo]"
	@touch $@

$(BIN)/.test: $(BIN)/.torch $(SOURCES)
	$(BIN)/pip install --quiet ".[demo,test]" cmake ninja
	@touch $@ $(BIN)/.demo

$(BIN)/.check: $(BIN)/.test
	$(BIN)/pip install --quiet ".[check]"
	@touch $@

demo: $(BIN)/.demo  ## set up, then train DQN on CartPole on the real buffer
	$(BIN)/sharpwave demo

# Both halves at once: the Python tests keep one core busy.
test: $(BIN)/.test  ## set up, then run every test
	$(MAKE) --no-print-directory -j2 --output-sync=target test-python test-cpp

test-python: $(BIN)/.test
	$(BIN)/python -m pytest

# Three builds: as users get it, with address and undefined-behaviour sanitizers, with the thread sanitizer (which is
# slow, and has nothing to say about one thread).
test-cpp: $(BIN)/.test
	@unset MAKEFLAGS; if ! printf '#include <gtest/gtest.h>\n' | $${CXX:-c++} -std=c++20 -x c++ -fsyntax-only - 2>/dev/null; then \
		echo "GoogleTest is not installed (Debian: libgtest-dev): the C++ tests were left out"; \
	else set -e; for sanitize in none address,undefined thread; do \
		echo "C++ tests, sanitizers: $$sanitize"; \
		build=$(CPP_BUILD)/$${sanitize%%,*}; \
		$(BIN)/cmake -S . -B $$build -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DSHARPWAVE_TESTS=ON \
			-DPython_EXECUTABLE=$(abspath $(BIN))/python \
			-DCMAKE_BUILD_TYPE=RelWithDebInfo -DSHARPWAVE_FAULTS=$$([ $$sanitize = address,undefined ] && echo ON || echo OFF) \
			-DSHARPWAVE_SANITIZE=$$(echo $$sanitize | sed s/none//) >/dev/null; \
		$(BIN)/cmake --build $$build | grep -E 'error|warning|FAILED' && exit 1 || true; \
		if [ $$sanitize = thread ]; then only='Threads.*:Workers.*:Face.IsSafeForThreads'; else only='*'; fi; \
		$$build/sharpwave_tests --gtest_brief=1 --gtest_filter="$$only"; \
		if [ $$sanitize = address,undefined ]; then (cd $$build && ./sharpwave_fuzz --changes 100 $(CORPUS)); fi; \
	done; \
	for locks in robust file; do for place in /dev/shm $${TMPDIR:-/tmp}; do \
		folder=$$place/sharpwave-crash-$$$$; \
		echo "Processes die, others go on: 50 rounds in $$place, $$locks locks"; \
		(if [ $$locks = file ]; then export SHARPWAVE_FILE_LOCKS=1; fi; \
		 $(CPP_BUILD)/address/sharpwave_crash 50 $$$$ $$folder); rmdir $$folder; \
	done; done; \
	echo "C++ example against the installed library"; \
	$(BIN)/cmake --install $(CPP_BUILD)/none --prefix $(CPP_BUILD)/installed >/dev/null; \
	$(BIN)/cmake -S examples/cpp -B $(CPP_BUILD)/example -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
		-DCMAKE_PREFIX_PATH=$(abspath $(CPP_BUILD)/installed) >/dev/null; \
	$(BIN)/cmake --build $(CPP_BUILD)/example >/dev/null; \
	$(CPP_BUILD)/example/replay; fi

# The processors whose order of loads and stores is weaker than x86's. Under qemu it is the code that is tested, not the
# order: that is the host's.
ARM := $(CPP_BUILD)/aarch64
ARM_CMAKE = $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	-DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/cmake/aarch64.cmake
ARM_RUN := qemu-aarch64 -L /usr/aarch64-linux-gnu
# What takes minutes there, and what needs robust mutexes: qemu-user has none.
ARM_LEFT_OUT := Tree.KeepsItsRootThroughManyUpdates:Storages.TellWhoHoldsTheIndexAndIsStopped

test-aarch64: $(BIN)/.test  ## the C++ tests, cross-compiled for aarch64 and run under qemu-user
	@missing=; for need in aarch64-linux-gnu-g++:g++-aarch64-linux-gnu qemu-aarch64:qemu-user; do \
		command -v $${need%%:*} >/dev/null || missing="$$missing $${need##*:}"; done; \
	[ -f /usr/src/googletest/CMakeLists.txt ] || missing="$$missing googletest"; \
	if [ -n "$$missing" ]; then echo "Not installed (Debian's names):$$missing: the aarch64 tests were left out"; else set -e; \
		$(ARM_CMAKE) -S /usr/src/googletest -B $(ARM)/googletest -DBUILD_GMOCK=OFF \
			-DCMAKE_INSTALL_PREFIX=$(abspath $(ARM))/installed >/dev/null; \
		$(BIN)/cmake --build $(ARM)/googletest --target install >/dev/null; \
		$(ARM_CMAKE) -S . -B $(ARM)/tests -DSHARPWAVE_TESTS=ON -DSHARPWAVE_BLOSC2=none \
			-DGTest_DIR=$(abspath $(ARM))/installed/lib/cmake/GTest >/dev/null; \
		$(BIN)/cmake --build $(ARM)/tests | grep -E 'error|warning|FAILED' && exit 1 || true; \
		$(ARM_RUN) $(ARM)/tests/sharpwave_tests --gtest_brief=1 --gtest_filter=-$(ARM_LEFT_OUT); \
		(cd $(ARM) && $(ARM_RUN) tests/sharpwave_fuzz --changes 20 $(CORPUS)); fi

# What the other projects import besides torch, by package name. Their accelerators' packages are not needed.
$(BIN)/.compat: $(BIN)/.test
	$(BIN)/pip install --quiet networkx transformers pydantic hydra-core tabulate tensorboardX psutil colorlog aiohttp numba nvidia-ml-py
	@touch $@

# AREAL, RLINF and APEXRL are paths to checkouts, e.g. make compat AREAL=../AReaL; those not given are left out.
compat: $(BIN)/.compat  ## run other projects' own tests on our classes: AREAL=, RLINF=, APEXRL= are their checkouts
	$(BIN)/python -m tests.originals $(if $(AREAL),--areal $(AREAL)) $(if $(RLINF),--rlinf $(RLINF)) $(if $(APEXRL),--apexrl $(APEXRL))

format: $(BIN)/.check  ## rewrite the sources in the house style
	$(BIN)/clang-format -i $(CPP_FILES)
	$(BIN)/ruff check --quiet --fix $(PY_PLACES)
	$(BIN)/ruff format --quiet $(PY_PLACES)

check: $(BIN)/.check  ## check format, lint and types of both languages
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/ruff check $(PY_PLACES)
	$(BIN)/ruff format --check $(PY_PLACES)
	$(BIN)/mypy

bench: $(BIN)/.test  ## measure against every peer that installs; writes the tables and plots of README and docs
	$(BIN)/python benchmarks/setup_peers.py
	$(BIN)/cmake -S . -B $(CPP_BUILD)/bench -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DSHARPWAVE_BENCHMARKS=ON \
		-DPython_EXECUTABLE=$(abspath $(BIN))/python >/dev/null
	$(BIN)/cmake --build $(CPP_BUILD)/bench
	mkdir -p benchmarks/results
	$(CPP_BUILD)/bench/bench_engine benchmarks/results/engine.json
	$(BIN)/python benchmarks/bench_replay.py
	$(BIN)/python benchmarks/bench_prioritized.py
	$(BIN)/python benchmarks/bench_nstep.py
	$(BIN)/python benchmarks/bench_windows.py
	$(BIN)/python benchmarks/bench_hindsight.py
	$(BIN)/python benchmarks/bench_pace.py
	$(BIN)/python benchmarks/bench_frames.py
	$(BIN)/python benchmarks/bench_compression.py
	$(BIN)/python benchmarks/bench_memory.py
	$(BIN)/python benchmarks/bench_scaling.py
	$(BIN)/python benchmarks/bench_processes.py
	$(BIN)/python benchmarks/bench_snapshot.py
	$(BIN)/python benchmarks/bench_open.py
	$(BIN)/python benchmarks/bench_returns.py
	$(BIN)/python benchmarks/bench_sequences.py
	$(BIN)/python benchmarks/bench_trajectories.py
	$(BIN)/python benchmarks/report.py

soak: $(BIN)/.test  ## long sweeps: many more random cases, ten minutes of damaged files, the threaded tests over and over
	HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest --timeout 7200 tests/model tests/unit/test_threads.py tests/fuzz
	SHARPWAVE_SOAK=1 HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest --timeout 7200 tests/model/test_sequences.py tests/unit/test_sequence_journal.py \
		tests/crash/test_journal_kills.py tests/fuzz/test_journal_damage.py
	SHARPWAVE_SOAK=1 $(BIN)/python -m pytest --timeout 7200 tests/crash/test_trajectory_kills.py tests/fuzz/test_trajectory_damage.py tests/unit/test_trajectories.py
	$(MAKE) test-cpp
	cd $(CPP_BUILD)/address && ./sharpwave_fuzz --seconds 600 --seed $$(date +%s) $(CORPUS)
	$(CPP_BUILD)/none/sharpwave_tests --gtest_brief=1 --gtest_repeat=100 --gtest_shuffle
	$(CPP_BUILD)/thread/sharpwave_tests --gtest_brief=1 --gtest_repeat=5 --gtest_filter='Threads.*'
	$(BIN)/cmake -S . -B $(CPP_BUILD)/faults -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DSHARPWAVE_FAULTS=ON \
		-DPython_EXECUTABLE=$(abspath $(BIN))/python >/dev/null
	$(BIN)/cmake --build $(CPP_BUILD)/faults --target sharpwave_crash >/dev/null
	$(CPP_BUILD)/faults/sharpwave_crash 8000 1 /dev/shm/sharpwave-soak && rmdir /dev/shm/sharpwave-soak
	SHARPWAVE_FILE_LOCKS=1 $(CPP_BUILD)/faults/sharpwave_crash 2000 2 /dev/shm/sharpwave-soak && rmdir /dev/shm/sharpwave-soak

clean:  ## remove what was made here
	rm -rf $(VENV) build
