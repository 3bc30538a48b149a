#!/bin/sh
# Runs what is about language models on a machine with a GPU and without a package index:
#
#     benchmarks/llm/on_device.sh check        # every test that needs the GPU: kernels, graphs, captured passes
#     benchmarks/llm/on_device.sh decode       # a decode step against its bytes; weights going in
#     benchmarks/llm/on_device.sh generation   # tokens a second against transformers
#     benchmarks/llm/on_device.sh learner      # tokens a second of a learner
#     benchmarks/llm/on_device.sh objectives   # the study of objectives
#     benchmarks/llm/on_device.sh warm         # the model that asynchronous and synchronous training start from: two minutes
#     benchmarks/llm/on_device.sh sweep        # short runs of both, to choose from: three minutes
#     benchmarks/llm/on_device.sh async        # asynchronous against synchronous training: about two minutes a seed
#
# The machine has torch, triton, transformers, safetensors, g++, cmake and ninja. What it lacks is prepared where there is a
# package index, and brought along in the folder carry/ (which git ignores):
#
#     DEVICE_PYTHON=python3.12 benchmarks/llm/on_device.sh prepare
#
# With DEVICE_PYTHON, a Python of the machine's version, the engine is built here; else each new machine builds it.
#
# Results go to $OUT where it is set, else to benchmarks/results, after each run that is part of them. Afterwards:
# python benchmarks/report.py. Options behind the verb are those of the benchmark. `warm` writes carry/warm, `sweep` writes
# carry/sweep, and `async` reads both; where $OUT is set, they are written there and copied, for a later machine. `async`
# goes on from carry/async/llm_async.json where that is: a result that was cut off, or of other seeds.
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH="src:carry/tools" PYTHONUNBUFFERED=1

build() { # a Python, for which the module is built, and the folder that gets it
    cmake -S . -B "build/device/$2" -G Ninja -DCMAKE_BUILD_TYPE=Release -DSHARPWAVE_PYTHON=ON -DSHARPWAVE_NET=OFF \
        -DPython_EXECUTABLE="$(command -v "$1")" -DSHARPWAVE_BLOSC2="$PWD/carry/blosc2/blosc2" >build.log 2>&1 &&
        cmake --build "build/device/$2" --target _core >>build.log 2>&1 || { tail -40 build.log; exit 1; }
    rm -f build.log
    mkdir -p "$2"
    cp "build/device/$2"/_core*.so "$2"
}

if [ "${1:-}" = prepare ]; then
    # Without compiled parts, so they serve every Python; blosc2 brings the library that the engine is linked with.
    "$PYTHON" -m pip install --quiet --upgrade --no-deps --no-compile --target carry/tools nanobind pytest pluggy iniconfig packaging pygments \
        "hypothesis<6.140" attrs sortedcontainers  # later ones have compiled parts
    "$PYTHON" -m pip install --quiet --upgrade --no-deps --no-compile --target carry/blosc2 blosc2
    [ -z "${DEVICE_PYTHON:-}" ] || build "$DEVICE_PYTHON" carry/core
    du -sh carry/*
    exit
fi

has_core() { "$PYTHON" -c "import sharpwave._core" 2>/dev/null; }
has_core || { cp carry/core/_core*.so src/sharpwave/ 2>/dev/null && has_core; } || build "$PYTHON" src/sharpwave

results="--results ${OUT:-benchmarks/results}"
kept=${OUT:-carry} # a command that is cut off leaves there what it has
mkdir -p carry
verb=${1:-}
[ $# = 0 ] || shift
case "$verb" in
check)
    # What needs no GPU was tested elsewhere; `sweep` shows whether whole runs work.
    failed=0
    "$PYTHON" -m pytest -q -p no:cacheprovider tests/llm/test_graph_decode.py tests/llm/test_learner.py -m gpu || failed=1
    "$PYTHON" -m pytest -q -p no:cacheprovider tests/llm/test_kernels.py || failed=1
    exit $failed
    ;;
decode) "$PYTHON" benchmarks/llm/bench_decode.py $results "$@" ;;
generation) "$PYTHON" benchmarks/llm/bench_generation.py $results "$@" ;;
learner) "$PYTHON" benchmarks/llm/learner.py $results --steps 10 --warmup 2 "$@" ;;
objectives) "$PYTHON" benchmarks/llm/objectives.py $results "$@" ;;
warm)
    "$PYTHON" benchmarks/llm/warm_start.py --seconds 80 --every 20 --out "$kept/warm" "$@"
    [ "$kept" = carry ] || cp -r "$kept/warm" carry
    ;;
sweep | async)
    # MPS=1: the processes' kernels run side by side, by NVIDIA's service for that.
    if [ -n "${MPS:-}" ]; then
        PATH="$PATH:/usr/local/nvidia/bin"
        nvidia-cuda-mps-control -d
        trap 'echo quit | nvidia-cuda-mps-control' EXIT # else later commands on this machine have it, too
    fi
    compare() { "$PYTHON" benchmarks/llm/async_sync.py --warm carry/warm --goal 0.6 "$@"; }
    if [ "$verb" = sweep ]; then
        compare --sweep "${SWEEP:-128:0:4,256:0:4,512:4:4,512:8:4,1024:8:4}" --seeds --results "$kept/sweep" "$@"
        [ "$kept" = carry ] || cp -r "$kept/sweep" carry
    else
        earlier=
        for file in carry/sweep/llm_async.json carry/async/llm_async.json; do
            [ ! -f $file ] || earlier="$earlier $file"
        done
        # Each has the best of what was tried: CASES says what that was, SEEDS=0 makes a short look of it.
        compare --cases "${CASES:-512:8:11,256:0:36}" --seeds ${SEEDS:-0 1 2} --earlier $earlier $results "$@"
    fi
    ;;
*) sed -n '2,24s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
