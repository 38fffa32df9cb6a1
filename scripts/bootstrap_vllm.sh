#!/usr/bin/env bash
# Makes the virtual environment of `make test-vllm`: vLLM with what its engine needs to serve small models on a CPU.
#
#   usage: scripts/bootstrap_vllm.sh VENV_FOLDER [PYTHON]        Python 3.12; 8 GB of disk
#
# vLLM pins versions of the CuTe DSL and tvm-ffi that this project does not take, and brings packages of many gigabytes
# for its kernels, which a CPU does not run. So it is installed without its dependencies, and those that are imported
# are named here.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:?usage: scripts/bootstrap_vllm.sh VENV_FOLDER [PYTHON]}
vllm=0.26.0
torch=2.11.0        # vLLM's pin
transformers=5.17.0 # the oldest that this project takes, and one that vLLM 0.26 works with

is_312='import sys; sys.exit(sys.version_info[:2] != (3, 12))'
python=
for candidate in ${2:+"$2"} python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python python3; do
  if "$candidate" -c "$is_312" 2>/dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "Needs Python 3.12, for which vLLM's torch was tried; name one: make PYTHON_VLLM=/path/to/python3.12 test-vllm" >&2
  exit 1
fi
if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
  echo "$venv is there and is no virtual environment; name another folder." >&2
  exit 1
fi
rm -rf "$venv"
echo "Setting up $venv with vLLM $vllm and torch $torch. The first time takes some minutes."
"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile)
"${pip[@]}" "torch==$torch"
"${pip[@]}" --no-deps "vllm==$vllm" compressed-tensors==0.17.0 depyf==0.20.0
"${pip[@]}" "transformers==$transformers" \
  aiohttp astor blake3 cachetools cbor2 cloudpickle dill 'fastapi>=0.133,<0.137' frozendict gguf jsonschema lark \
  'llguidance>=1.7,<1.8' loguru msgspec numba==0.65.0 openai openai-harmony partial-json-parser pillow prometheus_client protobuf \
  psutil py-cpuinfo pybase64 pydantic python-json-logger pyyaml pyzmq regex requests sentencepiece setproctitle \
  'setuptools<81' tiktoken uvloop watchfiles 'xgrammar>=0.2.1,<1'
# the one that this transformers loads kernels of the hub by: for continuous batching
"${pip[@]}" 'kernels>=0.16,<0.17'
"${pip[@]}" 'hypothesis>=6.100' 'pytest>=8.3,<9.2' 'pytest-xdist>=3.6,<4'
"${pip[@]}" --editable .
