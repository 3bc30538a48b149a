#!/bin/sh
# Puts GoogleTest where CMake finds it, under the folder that is named, and changes nothing outside: the system's own if
# it is there, else Debian's package unpacked (which needs no root), else its sources built. Fails with one line.
set -eu
folder=$1 cmake=$2 ninja=$3
rm -rf "$folder"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

is_installed() {
    printf '#include <gtest/gtest.h>\nTEST(A, B) {}\n' |
        "${CXX:-c++}" -std=c++20 -x c++ - -lgtest_main -lgtest -pthread -o "$folder/probe" 2>/dev/null
}

unpack_debian() {
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
    mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
    # The lists of packages go here too: the system's may be absent, and only root may fetch those.
    apt="apt-get -qq -o Dir::State::Lists=$folder/lists -o Dir::Cache=$folder/cache -o APT::Sandbox::User="
    (cd "$folder" && $apt update && $apt download libgtest-dev && dpkg-deb -x libgtest-dev_*.deb .) || return 1
    rm -rf "$folder/lists" "$folder/cache"
}

build_sources() {
    "$cmake" -S "$(dirname "$0")/googletest" -B "$folder/build" -G Ninja -DCMAKE_MAKE_PROGRAM="$ninja" \
        -DCMAKE_INSTALL_PREFIX="$folder/usr" && "$cmake" --build "$folder/build" --target install
}

for way in is_installed unpack_debian build_sources; do
    if $way >"$folder/$way.log" 2>&1; then
        touch "$folder/.ready"
        exit 0
    fi
done
echo "GoogleTest is missing and could not be fetched (tried Debian's package and its sources, see $folder/*.log): install it (Debian: libgtest-dev), or leave the C++ tests out with CPP=0" >&2
exit 1
