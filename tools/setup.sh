#!/bin/sh
# Makes the environment of the two README commands: setup.sh FOLDER. Needs Python 3.11 or 3.12, pip's index
# and about 4 GB of disk. Uses $PYTHON, or the first python3 that fits.
set -eu

folder=$1
say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup failed: %s\n' "$*" >&2; exit 1; }

[ -n "${PYTHON:-}" ] || fail "no python3 found; install Python 3.11 or 3.12, or set PYTHON=/path/to/python3"
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "$PYTHON does not run"
case $version in
  3.11|3.12) ;;
  *) fail "$PYTHON is Python $version; bucketrl needs 3.11 or 3.12: make PYTHON=/path/to/python3.12 …" ;;
esac
free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1024) }')
[ "$free" -ge 4096 ] || fail "only $free MB free here; the environment needs about 4 GB"

say "Python $version in $folder; about 3 GB, half a minute to some minutes"
rm -rf "$folder"
"$PYTHON" -m venv "$folder" || fail "python -m venv failed; on Debian and Ubuntu: apt install python$version-venv"
pip="$folder/bin/python -m pip --disable-pip-version-check"
$pip install -q uv==0.13.9 || fail "pip cannot install uv; is the package index reachable?"
uv() { VIRTUAL_ENV="$folder" UV_LINK_MODE=copy "$folder/bin/uv" "$@"; }

# The CPU build of torch is not on PyPI. An index or folder that pip is configured with may have it;
# otherwise uv knows PyTorch's own.
say "torch, CPU build"
$pip install -q --no-deps torch==2.13.0+cpu 2>/dev/null ||
  uv pip install -q --no-deps --torch-backend cpu torch==2.13.0 ||
  fail "torch 2.13.0+cpu is neither on pip's index nor on PyTorch's"
say "everything else, pinned in requirements/cpu.txt"
uv pip install -q --no-deps -r requirements/cpu.txt || fail "a pinned package could not be installed; see above"
uv pip install -q --no-deps -e . || fail "bucketrl itself could not be installed; see above"
"$folder/bin/bucketrl" --version >/dev/null || fail "bucketrl does not start"
say "done"
