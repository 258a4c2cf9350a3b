#!/bin/bash
# Run the Python tests of the CPU kernels on an emulated Arm processor, on a machine without one (`make test-arm`).
#
#   tools/arm.sh setup DIR             an aarch64 Python and torch, and qemu and a cross compiler for this machine
#   tools/arm.sh build DIR             the kernels, and beside them the package and its tests, in DIR/kvops
#   tools/arm.sh python DIR ARGS...    that Python, in DIR/kvops
#   tools/arm.sh smoke DIR WHEEL       call the operators of an aarch64 wheel, at every instruction-set level
#
# No chroot and no binfmt_misc: qemu-user runs one process, which cannot start others. Debian's Python is unpacked into
# DIR/root, wheels into DIR/site. torch is 2.10.0, whose aarch64 wheel is the last small one: 2.13 comes with CUDA.
set -euo pipefail
step=$1 dir=$(mkdir -p "$2" && cd "$2" && pwd) here=$(cd "$(dirname "$0")/.." && pwd)
shift 2

setup() {
  if ! { command -v qemu-aarch64-static && command -v aarch64-linux-gnu-g++; } >/dev/null; then
    apt-get -qq update
    apt-get -qq install -y qemu-user-static g++-aarch64-linux-gnu >/dev/null
  fi
  rm -rf "$dir"/{debs,wheels,root,site}
  mkdir -p "$dir"/{apt/lists/partial,apt/archives/partial,debs,root,site}
  : >"$dir/apt/status"
  local apt=(-qq -oAPT::Architecture=arm64 -oAPT::Architectures=arm64 -oAPT::Sandbox::User=root
    -oDir::State::Lists="$dir/apt/lists" -oDir::State::status="$dir/apt/status"
    -oDir::Cache="$dir/apt" -oDir::Cache::archives="$dir/apt/archives")
  apt-get "${apt[@]}" update
  (cd "$dir/debs" && apt-get "${apt[@]}" download libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g libexpat1 libssl3 libffi8 \
    libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libncursesw6 libtinfo6 libreadline8 libcrypt1 \
    python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libpython3.11)
  for x in "$dir"/debs/*.deb; do dpkg -x "$x" "$dir/root"; done
  "$here/.venv/bin/python" -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: -d "$dir/wheels" \
    --python-version 3.11 --implementation cp --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
    --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 torch==2.10.0 numpy pytest pluggy iniconfig \
    packaging pygments hypothesis sortedcontainers expecttest setuptools typing_extensions sympy mpmath networkx jinja2 \
    markupsafe filelock fsspec
  for x in "$dir"/wheels/*.whl; do "$here/.venv/bin/python" -m zipfile -e "$x" "$dir/site"; done
}

build() {
  cmake=$here/.venv/bin/cmake
  "$cmake" -S "$here" -B "$dir/build" -G Ninja -DCMAKE_MAKE_PROGRAM="$here/.venv/bin/ninja" -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
    -DKVOPS_TORCH_DIR="$dir/site/torch" -DKVOPS_CUDA=0 -DCMAKE_INSTALL_PREFIX="$dir/kvops" >/dev/null
  "$cmake" --build "$dir/build" >/dev/null
  rm -rf "$dir/kvops"
  mkdir "$dir/kvops"
  tar -C "$here" --exclude='*.so' --exclude=__pycache__ -c kvops tests bench docs csrc pyproject.toml CMakeLists.txt |
    tar -C "$dir/kvops" -x
  "$cmake" --install "$dir/build" >/dev/null
}

emulated() { # FOLDER ARGS...: Python, with the package in this folder
  cd "$1"
  PYTHONPATH="$1:$dir/site" OMP_NUM_THREADS=1 qemu-aarch64-static -L "$dir/root" "$dir/root/usr/bin/python3.11" "${@:2}"
}

smoke() {
  [ -f "$1" ] || { echo "no wheel $1; run: make wheel ARCH=aarch64" >&2; exit 2; }
  rm -rf "$dir/smoke"
  "$here/.venv/bin/python" -m zipfile -e "$1" "$dir/smoke"
  local levels
  levels=$(emulated "$dir/smoke" -c 'import kvops; print(*kvops.build_info()["isa_built"])')
  for level in $levels; do
    KVOPS_ISA=$level emulated "$dir/smoke" "$here/tests/package/smoke_wheel.py" --here
    echo "passed, emulated: $(basename "$1"), level $level"
  done
}

case $step in
  setup) setup ;;
  build) build ;;
  python) emulated "$dir/kvops" "$@" ;;
  smoke) smoke "$1" ;;
  *) echo "usage: tools/arm.sh setup|build|python|smoke DIR" >&2; exit 2 ;;
esac
