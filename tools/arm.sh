#!/bin/bash
# Try an aarch64 wheel on an emulated Arm processor, on a machine without one (`make smoke-arm`, `make test-arm`).
#
#   tools/arm.sh setup DIR                  an aarch64 Python and torch, and qemu and a cross compiler for this machine
#   tools/arm.sh smoke DIR WHEEL            call the operators of the wheel, at every instruction-set level
#   tools/arm.sh test DIR WHEEL ARGS...     pytest, with the wheel's package
#
# If WHEEL is "", it is the newest one in dist/.
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

unpack() { # WHEEL
  wheel=${1:-$(ls -t "$here"/dist/*_aarch64.whl 2>/dev/null | head -n 1)} || true
  [ -f "$wheel" ] || { echo "no wheel ${wheel:-dist/*_aarch64.whl}; run: make wheel ARCH=aarch64" >&2; exit 2; }
  rm -rf "${dir:?}/$step"
  "$here/.venv/bin/python" -m zipfile -e "$wheel" "$dir/$step"
}

emulated() {
  cd "$dir/$step"
  PYTHONPATH="$dir/$step:$dir/site" OMP_NUM_THREADS=1 qemu-aarch64-static -L "$dir/root" "$dir/root/usr/bin/python3.11" "$@"
}

run_tests() { # ARGS...: beside the package
  tar -C "$here" --exclude=__pycache__ -c tests bench docs csrc pyproject.toml CMakeLists.txt | tar -C "$dir/$step" -x
  emulated -m pytest "$@"
}

smoke() {
  local levels
  levels=$(emulated -c 'import kvops; print(*kvops.build_info()["isa_built"])')
  for level in $levels; do
    KVOPS_ISA=$level emulated "$here/tests/package/smoke_wheel.py" --here
    echo "passed, emulated: $(basename "$wheel"), level $level"
  done
}

case $step in
  setup) setup ;;
  smoke) unpack "$1"; smoke ;;
  test) unpack "$1"; run_tests "${@:2}" ;;
  *) echo "usage: tools/arm.sh setup|smoke|test DIR [WHEEL [ARGS...]]" >&2; exit 2 ;;
esac
