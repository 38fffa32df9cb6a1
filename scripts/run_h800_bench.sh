#!/usr/bin/env bash
# Finds a Python that has what bench/card.py needs, and runs it: see there, or --help. Without a GPU torch and einops
# are enough.
#
#   usage: scripts/run_h800_bench.sh [--quick] [--only REGEX] [--trace] [--out DIR]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

for python in "$root/.venv/bin/python" python3 python; do
  if command -v "$python" >/dev/null && (cd "$root" && "$python" -c 'import torch, einops') 2>/dev/null; then
    PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m bench.card "$@"
  fi
done
echo "No Python with torch and einops was found: 'make demo' sets up .venv, or pip install $root" >&2
exit 1
