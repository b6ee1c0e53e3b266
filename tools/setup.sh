#!/bin/sh
# Makes the environment of the two README commands: setup.sh FOLDER. Needs Python 3.11 or 3.12 with venv, a
# package index that pip reaches, and about 4 GB of disk. $PYTHON chooses the interpreter.
set -eu

folder=$1
say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup failed: %s\n' "$*" >&2; exit 1; }

# A name that is found may still not run (version managers), so each one is tried.
python=
for candidate in ${PYTHON:-python3.11 python3.12 python3 python}; do
  version=$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  case $version in 3.11|3.12) python=$candidate; break ;; esac
done
[ -n "$python" ] || fail "${PYTHON:-none of python3.11, python3.12, python3} is a Python 3.11 or 3.12 that runs;" \
  "install one, or name it: make PYTHON=/path/to/python3.12 …"
free=$(df -Pk . | awk 'NR == 2 { print int($4 / 1024) }')
[ "$free" -ge 4096 ] || fail "only $free MB are free here; the environment needs about 4 GB"

say "[1/4] Python $version in $folder; 4 GB in all, from half a minute to some minutes"
rm -rf "$folder"
"$python" -m venv "$folder" || fail "python -m venv failed; on Debian and Ubuntu: apt install python$version-venv"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check --retries 2 "$@"; }
uv() { VIRTUAL_ENV="$folder" UV_LINK_MODE=copy "$folder/bin/uv" "$@"; }
pip install -qq uv==0.13.9 || fail "pip cannot install uv; is the package index reachable?"

# The CPU build of torch is not on PyPI. An index or folder that pip is configured with may have it;
# otherwise uv knows PyTorch's own.
say "[2/4] torch, CPU build"
pip install -qq --no-deps torch==2.13.0+cpu 2>/dev/null ||
  uv pip install -q --no-deps --torch-backend cpu torch==2.13.0 ||
  fail "torch 2.13.0+cpu is neither on pip's index nor on PyTorch's; are they reachable?"
say "[3/4] everything else, as pinned in requirements/cpu.txt"
uv pip install -q --no-deps -r requirements/cpu.txt || fail "a pinned package could not be installed; see above"
say "[4/4] bucketrl itself"
uv pip install -q --no-deps -e . || fail "bucketrl could not be installed; see above"
"$folder/bin/bucketrl" --version >/dev/null || fail "bucketrl does not start"
