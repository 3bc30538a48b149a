#!/bin/sh
# Makes an environment with SGLang's server for a CPU: get_sglang.sh FOLDER VLLM_FOLDER, about 0.3 GB on the disk.
# VLLM_FOLDER is an environment of get_vllm.sh. It has to stay: most packages are used from there.
#
# SGLang does not support this. It is good for tests of the protocol, with small models, and says nothing of the speed.
set -e
folder=$1
vllm=$2
release=0.5.23
if [ -z "$folder" ] || ! [ -x "$vllm/bin/python" ]; then
	echo "get_sglang.sh: expected FOLDER VLLM_FOLDER, the second made by get_vllm.sh; got '$folder' '$vllm'" >&2
	exit 1
fi

"$vllm/bin/python" -m venv "$folder"
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# 1. torch for the CPU, transformers, and most of what the server imports are those of vLLM.
"$vllm/bin/python" -c 'import sysconfig; print(*{sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}, sep="\n")' \
	>"$site/vllm.pth"

# 2. Its dependencies are for CUDA only, so it is installed without them. The first line has those that it imports on a
#    CPU, and vLLM does not have.
"$folder/bin/pip" install --quiet gguf==0.19.0 ipython==9.18.1 orjson==3.13.0 soundfile==0.13.1
"$folder/bin/pip" install --quiet --no-deps "sglang==$release"

# 3. The server imports the transformations of images, which are Python. This is the release for vLLM's torch. It comes
#    built for CUDA and cannot be loaded, so what it says about its compiled functions goes: "torchvision::nms does not
#    exist".
"$folder/bin/pip" install --quiet --no-deps torchvision==0.28.0
: >"$site/torchvision/_meta_registrations.py"

# 4. SGLang's kernels have no build for the CPU. It imports them everywhere, and calls none of them with the torch
#    back ends for attention and sampling: if it does, the request fails with their name.
mkdir -p "$site/sgl_kernel"
cat >"$site/sgl_kernel/__init__.py" <<'END'
"""Stands in for SGLang's kernels, which have no build for the CPU: names can be imported, and fail when called."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name}: this environment has none of SGLang's kernels")

    return missing
END

# Whatever is missing shows here, and not when the tests wait for a server.
SGLANG_USE_CPU_ENGINE=1 "$folder/bin/python" -W ignore -c '
import sglang.launch_server, sglang.version, torch
import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.models.qwen3

assert torch.version.cuda is None, torch.__version__
print("sglang", sglang.version.__version__)'
