#!/usr/bin/env bash
# Makes a virtual environment with all that `make demo`, `make test` and `make lint` need.
#
#   usage: scripts/bootstrap.sh VENV_FOLDER [PYTHON]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:?usage: scripts/bootstrap.sh VENV_FOLDER [PYTHON]}
python=${2:-python3}
torch_pin="torch==2.13.0" # within pyproject.toml's range; a pin, so that every machine tests the same one

if ! "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'; then
  echo "Needs Python 3.10 to 3.13; '$python' is: $("$python" --version 2>&1)." >&2
  echo "Name another one: make PYTHON=python3.12 ..." >&2
  exit 1
fi

# A torch that already reaches a GPU fits that machine's driver: keep it. Any other machine gets the pinned one.
has_cuda_torch='
import sys
try:
    import torch
except ImportError:
    sys.exit(1)
version = tuple(int(part) for part in torch.__version__.split(".")[:2])
sys.exit(not (torch.cuda.is_available() and (2, 11) <= version < (2, 15)))
'
if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
  echo "$venv is there and is no virtual environment; name another folder." >&2
  exit 1
fi
rm -rf "$venv"
torch="" # what is there
if "$python" -c "$has_cuda_torch"; then
  echo "Setting up $venv around the torch of $python, which reaches a GPU."
  "$python" -m venv --system-site-packages "$venv"
else
  echo "Setting up $venv with $torch_pin. The first time takes a few minutes."
  "$python" -m venv "$venv"
  torch=$torch_pin
fi
# --no-compile: most modules of torch and transformers are never imported; compiling all of them took 45 of 90 s
pip=("$venv/bin/python" -m pip install --no-compile --quiet --disable-pip-version-check)
# the pip that comes with Python 3.11 compares each file on the index with 900 tags: 10 s of 37
"${pip[@]}" --upgrade pip
"${pip[@]}" ${torch:+"$torch"} --editable ".[dev,demo,bench]"
