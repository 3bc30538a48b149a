#!/bin/sh
# Runs what is about language models on a machine with a GPU and without a package index:
#
#     benchmarks/llm/on_device.sh check        # builds the engine, then every test of the kernels and graphs on the GPU
#     benchmarks/llm/on_device.sh decode       # a decode step against its bytes; weights going in
#     benchmarks/llm/on_device.sh generation   # tokens a second against transformers
#     benchmarks/llm/on_device.sh learner      # tokens a second of a learner
#     benchmarks/llm/on_device.sh objectives   # the study of objectives
#     benchmarks/llm/on_device.sh async        # asynchronous against synchronous training; first the model that both start from
#
# The machine has torch, triton, transformers, safetensors, g++, cmake and ninja. What it lacks is prepared where there is a
# package index, and brought along in the folder carry/ (which git ignores):
#
#     benchmarks/llm/on_device.sh prepare
#
# Results go to $OUT where it is set, else to benchmarks/results. Afterwards: python benchmarks/report.py.
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH="src:carry/tools" PYTHONUNBUFFERED=1

if [ "${1:-}" = prepare ]; then
    # Without compiled parts, so they serve every Python; blosc2 brings the library that the engine is linked with.
    "$PYTHON" -m pip install --quiet --upgrade --no-deps --target carry/tools nanobind pytest pluggy iniconfig packaging pygments \
        "hypothesis<6.140" attrs sortedcontainers  # later ones have compiled parts
    "$PYTHON" -m pip install --quiet --upgrade --no-deps --no-compile --target carry/blosc2 blosc2
    du -sh carry/tools carry/blosc2
    exit
fi

if ! "$PYTHON" -c "import sharpwave._core" 2>/dev/null; then
    cmake -S . -B build/device -G Ninja -DCMAKE_BUILD_TYPE=Release -DSHARPWAVE_PYTHON=ON -DSHARPWAVE_NET=OFF \
        -DPython_EXECUTABLE="$(command -v "$PYTHON")" -DSHARPWAVE_BLOSC2="$PWD/carry/blosc2/blosc2" >build.log 2>&1 &&
        cmake --build build/device --target _core >>build.log 2>&1 || { tail -40 build.log; exit 1; }
    rm -f build.log
    cp build/device/_core*.so src/sharpwave/
fi

results="--results ${OUT:-benchmarks/results}"
case "${1:-}" in
check) "$PYTHON" -m pytest -q -p no:cacheprovider tests/llm/test_kernels.py tests/llm/test_graph_decode.py tests/llm/test_engine_swaps.py \
    tests/llm/test_learner.py ;;
decode) "$PYTHON" benchmarks/llm/bench_decode.py $results ;;
generation) "$PYTHON" benchmarks/llm/bench_generation.py $results ;;
learner) "$PYTHON" benchmarks/llm/learner.py $results --steps 10 --warmup 2 ;;
objectives) "$PYTHON" benchmarks/llm/objectives.py $results ;;
async)
    warm=${WARM:-carry/warm}
    [ -d "$warm" ] || "$PYTHON" benchmarks/llm/warm_start.py --seconds 80 --out "$warm"
    "$PYTHON" benchmarks/llm/async_sync.py --warm "$warm" --goal 0.68 $results
    ;;
*) sed -n '2,16s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
