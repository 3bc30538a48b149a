# Everything a clone needs is made here: `make demo` and `make test` set themselves up in .venv, by package name, with pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := CMakeLists.txt pyproject.toml examples/per_dqn.py $(shell find core bindings src -type f -not -name '*.pyc')
CPP_BUILD := build/cpp
GOOGLETEST := build/googletest
WHEELS := build/wheels
COMMA := ,
CORPUS := $(CURDIR)/tests/fuzz/corpus
CPP_FILES := $(shell find core bindings tests/cpp tests/crash tests/fuzz benchmarks examples -name '*.h' -o -name '*.cpp' -o -name '*.inc')
PY_PLACES := src tests benchmarks examples

.DEFAULT_GOAL := help
.PHONY: help demo test test-python test-cpp test-cpp-release test-cpp-address test-cpp-thread test-python-address \
	test-aarch64 compat backends check tidy api format bench soak clean

help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# What compiling needs is small and comes first: compiling goes on while the large packages are fetched.
$(BIN)/.tools: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --group build
	@touch $@

# torch is pinned, and installed before anything that could ask for another one.
$(BIN)/.torch: $(BIN)/.tools
	$(BIN)/pip install --quiet torch==2.13.0
	@touch $@

# Not isolated: the compiler's flags stay the same from one build to the next, so only what changed is compiled again,
# and the C++ tests run on the library that was compiled for the wheel.
$(WHEELS)/.built: $(BIN)/.tools $(SOURCES)
	@rm -rf $(WHEELS)
	$(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir $(WHEELS) \
		--config-settings=build-dir=$(CPP_BUILD)/release --config-settings=build.targets="_core;_core_stub;sharpwave_cpp" .
	@touch $@

# In two steps: pip would leave an older build of the same version where it is.
$(BIN)/.demo: $(BIN)/.torch $(WHEELS)/.built
	$(BIN)/pip install --quiet --force-reinstall --no-deps $(WHEELS)/sharpwave-*.whl
	$(BIN)/pip install --quiet "$$(echo $(WHEELS)/sharpwave-*.whl)[demo]"
	@touch $@

$(BIN)/.test: $(BIN)/.torch $(WHEELS)/.built
	$(BIN)/pip install --quiet --force-reinstall --no-deps $(WHEELS)/sharpwave-*.whl
	$(BIN)/pip install --quiet "$$(echo $(WHEELS)/sharpwave-*.whl)[demo]" --group test
	@touch $@ $(BIN)/.demo

$(BIN)/.check: $(BIN)/.test
	$(BIN)/pip install --quiet --group check
	@touch $@

demo: $(BIN)/.demo  ## set up, then train DQN on CartPole on the real buffer
	$(BIN)/sharpwave demo

test:  ## set up, then run every test (CPP=0 leaves out those in C++)
	@$(MAKE) --no-print-directory -j2 --output-sync=target test-python $(if $(filter 0,$(CPP)),,test-cpp)

# More processes than cores: tests of processes and deadlines wait more than they work.
test-python: $(BIN)/.test
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal

$(GOOGLETEST)/.ready: $(BIN)/.tools tests/cpp/get_googletest.sh
	@tests/cpp/get_googletest.sh $(GOOGLETEST) $(BIN)/cmake $(abspath $(BIN))/ninja

# $(call cpp_build,NAME,DEFINITIONS,TARGETS): says what went wrong, else nothing.
define cpp_build
@$(BIN)/cmake -S . -B $(CPP_BUILD)/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DSHARPWAVE_TESTS=ON \
	-DPython_EXECUTABLE=$(abspath $(BIN))/python -DCMAKE_PREFIX_PATH=$(abspath $(GOOGLETEST))/usr $(2) >/dev/null
@$(BIN)/cmake --build $(CPP_BUILD)/$(1) --target $(3) >$(CPP_BUILD)/$(1).log || { cat $(CPP_BUILD)/$(1).log; exit 1; }
endef
# Sanitizers take time in the compiler's optimiser, which has little to do here.
SANITIZED := -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1"

# One after the other: each build keeps every core busy. What they need is made first: a second make would make it twice.
test-cpp: $(GOOGLETEST)/.ready $(WHEELS)/.built
	@unset MAKEFLAGS; for part in release address thread; do $(MAKE) --no-print-directory test-cpp-$$part || exit 1; done

test-cpp-release: $(GOOGLETEST)/.ready $(WHEELS)/.built  # what users get, and the example against it, installed
	@echo "C++ tests on the library of the wheel"
	@[ -f $(CPP_BUILD)/release/libsharpwave_net.a ] || echo "libzmq is missing (Debian: libzmq3-dev): the C++ client of servers was left out"
	$(call cpp_build,release,,sharpwave_tests)
	@$(CPP_BUILD)/release/sharpwave_tests --gtest_brief=1
	@$(BIN)/cmake --install $(CPP_BUILD)/release --component cpp --prefix $(CPP_BUILD)/installed >/dev/null
	@$(BIN)/cmake -S examples/cpp -B $(CPP_BUILD)/example -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
		-DCMAKE_PREFIX_PATH=$(abspath $(CPP_BUILD)/installed) >/dev/null
	@$(BIN)/cmake --build $(CPP_BUILD)/example >/dev/null
	@$(CPP_BUILD)/example/replay

test-cpp-address: $(GOOGLETEST)/.ready  # with the sanitizers for memory and undefined behaviour, and with crashes
	@echo "C++ tests with the address and undefined-behaviour sanitizers"
	$(call cpp_build,address,$(SANITIZED) -DSHARPWAVE_FAULTS=ON -DSHARPWAVE_SANITIZE=address$(COMMA)undefined,all)
	@$(CPP_BUILD)/address/sharpwave_tests --gtest_brief=1
	@cd $(CPP_BUILD)/address && ./sharpwave_fuzz --changes 100 $(CORPUS)
	@$(CPP_BUILD)/address/sharpwave_fuzz_packed --rounds 50000
	@for locks in robust file; do for place in /dev/shm $${TMPDIR:-/tmp}; do \
		folder=$$place/sharpwave-crash-$$$$; \
		echo "Processes die, others go on: 50 rounds in $$place, $$locks locks"; \
		(if [ $$locks = file ]; then export SHARPWAVE_FILE_LOCKS=1; fi; \
		 $(CPP_BUILD)/address/sharpwave_crash 50 $$$$ $$folder) && rmdir $$folder || exit 1; \
	done; done

test-cpp-thread: $(GOOGLETEST)/.ready  # with the thread sanitizer: all files with tests that have several threads
	@echo "C++ tests with the thread sanitizer"
	$(call cpp_build,thread,$(SANITIZED) -DSHARPWAVE_SANITIZE=thread,sharpwave_tests)
	@$(CPP_BUILD)/thread/sharpwave_tests --gtest_brief=1

# The extension with the address sanitizer inside a Python that has none: the sanitizer's library, and that of C++ whose
# throw it wraps, are loaded before all else. Python's own memory is still in use when a process ends: leaks are not
# looked for. Left out: tests that limit the address space, of which the sanitizer reserves 16 TiB; test_waits.py, which
# loads libraries of its own first and catches abi::__forced_unwind, a null reference to the sanitizer; GPUs and adapters.
PY_ADDRESS := $(CPP_BUILD)/python-address
PY_ADDRESS_TESTS := $(addprefix tests/unit/test_,$(addsuffix .py,attributes bad_input bad_values compression derived files \
	format hindsight_calls inputs life masked_draws order_calls pace_calls packed_rows priorities results stacks threads window_calls))

test-python-address: $(BIN)/.test  # part of `make soak`
	@echo "Python tests with the address and undefined-behaviour sanitizers"
	@$(BIN)/cmake -S . -B $(PY_ADDRESS) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DSHARPWAVE_PYTHON=ON \
		-DPython_EXECUTABLE=$(abspath $(BIN))/python $(SANITIZED) -DSHARPWAVE_SANITIZE=address$(COMMA)undefined >/dev/null
	@$(BIN)/cmake --build $(PY_ADDRESS) --target _core >$(PY_ADDRESS).log || { cat $(PY_ADDRESS).log; exit 1; }
	@rm -rf $(PY_ADDRESS)/package && mkdir $(PY_ADDRESS)/package && cp -r src/sharpwave $(PY_ADDRESS)/package
	@rm -f $(PY_ADDRESS)/package/sharpwave/_core* && cp $(PY_ADDRESS)/_core*.so $(PY_ADDRESS)/package/sharpwave
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		PYTHONPATH=$(abspath $(PY_ADDRESS))/package $(BIN)/python -m pytest --timeout 3600 $(PY_ADDRESS_TESTS)

# The processors whose order of loads and stores is weaker than x86's. Under qemu it is the code that is tested, not the
# order: that is the host's.
ARM := $(CPP_BUILD)/aarch64
ARM_CMAKE = $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	-DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/cmake/aarch64.cmake
ARM_RUN := qemu-aarch64 -L /usr/aarch64-linux-gnu
# One takes minutes there, one needs robust mutexes, which qemu-user lacks, and one leaves no address space, without which
# qemu itself aborts.
ARM_LEFT_OUT := Tree.KeepsItsRootThroughManyUpdates:Storages.TellWhoHoldsTheIndexAndIsStopped
ARM_LEFT_OUT := $(ARM_LEFT_OUT):Workers.GoOnAloneWhereTheSystemHasNoThreadLeft

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
	$(BIN)/pip install --quiet networkx transformers pydantic hydra-core tabulate tensorboardX psutil colorlog aiohttp numba \
		nvidia-ml-py omegaconf sortedcontainers matplotlib pyvers importlib_metadata zipp
	$(BIN)/pip install --quiet --no-deps "tensordict>=0.6,<0.12.2"  # which would bring another torch
	@touch $@

# AREAL, RLINF and APEXRL are paths to checkouts, e.g. make compat AREAL=../AReaL; those not given are left out.
compat: $(BIN)/.compat  ## run other projects' own tests on our classes: AREAL=, RLINF=, APEXRL= are their checkouts
	$(BIN)/python -m tests.originals $(if $(AREAL),--areal $(AREAL)) $(if $(RLINF),--rlinf $(RLINF)) $(if $(APEXRL),--apexrl $(APEXRL))

# About 3.4 GB, made once. vLLM's CPU build is for Python 3.11: VLLM_PYTHON= is another one's path.
VLLM_PYTHON ?= python3.11
.venvs/vllm/.ready: tests/llm/get_vllm.sh
	tests/llm/get_vllm.sh .venvs/vllm $(VLLM_PYTHON)
	@touch $@

.venvs/sglang/.ready: tests/llm/get_sglang.sh .venvs/vllm/.ready
	tests/llm/get_sglang.sh .venvs/sglang .venvs/vllm
	@touch $@

backends: $(BIN)/.test .venvs/sglang/.ready  ## the conformance suite of generators with real vLLM and SGLang on the CPU; writes its table
	SHARPWAVE_VLLM=$(CURDIR)/.venvs/vllm/bin/vllm SHARPWAVE_SGLANG=$(CURDIR)/.venvs/sglang/bin/python \
		$(BIN)/python tests/llm/conformance_table.py

format: $(BIN)/.check  ## rewrite the sources in the house style
	$(BIN)/clang-format -i $(CPP_FILES)
	$(BIN)/ruff check --quiet --fix $(PY_PLACES)
	$(BIN)/ruff format --quiet $(PY_PLACES)

# Compile commands are all that it needs: it configures the engine alone, and builds nothing.
tidy: $(BIN)/.check  ## clang-tidy over the engine, with the checks of .clang-tidy
	@$(BIN)/cmake -S . -B $(CPP_BUILD)/tidy -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja \
		-DPython_EXECUTABLE=$(abspath $(BIN))/python -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DCMAKE_UNITY_BUILD=OFF >/dev/null
	@echo "clang-tidy over $$(grep -c '"file"' $(CPP_BUILD)/tidy/compile_commands.json) files"
	@$(BIN)/python $(BIN)/run-clang-tidy.py -clang-tidy-binary $(abspath $(BIN))/clang-tidy -p $(CPP_BUILD)/tidy \
		-j $$(nproc) -quiet >$(CPP_BUILD)/tidy.log 2>&1 || { cat $(CPP_BUILD)/tidy.log; exit 1; }

api: $(BIN)/.test  ## rewrite the text of the interfaces: tests/house/api.txt, bindings/_core.pyi
	$(BIN)/python tests/house/interfaces.py --update

check: $(BIN)/.check  ## check format, lint and types, the order of the rooms, and the committed interfaces
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/ruff check $(PY_PLACES)
	$(BIN)/ruff format --check $(PY_PLACES)
	$(BIN)/mypy
	$(BIN)/python tests/house/rooms.py
	$(BIN)/python tests/house/interfaces.py

bench: $(BIN)/.test  ## measure against every peer that installs; writes the tables and plots of README and docs
	$(BIN)/python benchmarks/setup_peers.py
	$(BIN)/cmake -S . -B $(CPP_BUILD)/bench -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DSHARPWAVE_BENCHMARKS=ON \
		-DPython_EXECUTABLE=$(abspath $(BIN))/python >/dev/null
	$(BIN)/cmake --build $(CPP_BUILD)/bench
	@for script in $(sort $(wildcard benchmarks/bench_*.py)); do \
		started=$$(date +%s); echo "$$script"; $(BIN)/python $$script || exit 1; \
		echo "$$script took $$(($$(date +%s) - started)) s"; \
	done
	$(BIN)/python benchmarks/report.py

soak: $(BIN)/.test  ## long sweeps: many more random cases, ten minutes of damaged files, the threaded tests over and over
	$(BIN)/python -m pytest -o addopts=-q -p randomly --numprocesses 2
	@echo "What is about time, ten times beside two busy loops"
	@sh -c 'while :; do :; done' & one=$$!; sh -c 'while :; do :; done' & two=$$!; \
	trap "kill $$one $$two" EXIT; trap 'exit 1' INT TERM; \
	for turn in 1 2 3 4 5 6 7 8 9 10; do $(BIN)/python -m pytest -m timing || exit 1; done
	HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest --timeout 7200 tests/model tests/unit/test_threads.py tests/fuzz
	SHARPWAVE_SOAK=1 HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest --timeout 7200 tests/model/test_sequences.py tests/unit/test_sequence_journal.py \
		tests/crash/test_journal_kills.py tests/fuzz/test_journal_damage.py
	SHARPWAVE_SOAK=1 $(BIN)/python -m pytest --timeout 7200 tests/contract/test_device.py tests/unit/test_device_replay.py
	SHARPWAVE_SOAK=1 $(BIN)/python -m pytest --timeout 7200 tests/crash/test_trajectory_kills.py tests/fuzz/test_trajectory_damage.py tests/unit/test_trajectories.py
	$(BIN)/python tests/service/sweep.py --rounds 1000
	$(BIN)/python tests/service/wrong_messages.py --seconds 60
	$(BIN)/python tests/service/crowd.py --minutes 0.34
	$(BIN)/python tests/llm/run_sweep.py --kills 100 --stale mask --goal 0.8
	$(BIN)/python tests/llm/run_sweep.py --kills 100 --stale drop --goal 0.8
	$(MAKE) test-cpp
	cd $(CPP_BUILD)/address && ./sharpwave_fuzz --seconds 600 --seed $$(date +%s) $(CORPUS)
	$(CPP_BUILD)/release/sharpwave_tests --gtest_brief=1 --gtest_repeat=100 --gtest_shuffle
	$(CPP_BUILD)/thread/sharpwave_tests --gtest_brief=1 --gtest_repeat=5 --gtest_filter='Threads.*'
	$(MAKE) test-python-address
	$(BIN)/cmake -S . -B $(CPP_BUILD)/faults -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja -DSHARPWAVE_FAULTS=ON \
		-DPython_EXECUTABLE=$(abspath $(BIN))/python >/dev/null
	$(BIN)/cmake --build $(CPP_BUILD)/faults --target sharpwave_crash >/dev/null
	$(CPP_BUILD)/faults/sharpwave_crash 8000 1 /dev/shm/sharpwave-soak && rmdir /dev/shm/sharpwave-soak
	SHARPWAVE_FILE_LOCKS=1 $(CPP_BUILD)/faults/sharpwave_crash 2000 2 /dev/shm/sharpwave-soak && rmdir /dev/shm/sharpwave-soak

clean:  ## remove what was made here
	rm -rf $(VENV) build
