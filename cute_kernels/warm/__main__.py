"""`python -m cute_kernels.warm`: compile a model's kernels into the disk cache; see `cute_kernels.warm`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from cute_kernels.gqa.blocks_plan import INDEX_BLOCKS
from cute_kernels.gqa.codes import CODES, KINDS
from cute_kernels.gqa.layouts import LAYOUTS
from cute_kernels.indexer.append_spec import SCALE_RULES
from cute_kernels.runtime.cache import entry_name
from cute_kernels.runtime.compile import missing
from cute_kernels.warm import GqaShape, IndexShape, MlaShape, PrefillShape, kernel_specs, warm
from cute_kernels.warm.shapes import H100_SMS, SCALES, Shape
from fp8_mla.formats import FORMATS, V3_2


def numbers(text: str) -> tuple[int, ...]:
    """Parses numbers and ranges with both ends: "1,2,8-64"."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        found += range(int(first), int(last if dash else first) + 1)
    return tuple(found)


def windows(text: str) -> tuple[int | None, ...]:
    """Parses windows of a model's layers: "none,128"."""
    return tuple(None if part == "none" else int(part) for part in text.split(","))


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command's options."""
    it = argparse.ArgumentParser(prog="python -m cute_kernels.warm", description=__doc__)
    it.add_argument("--heads", type=int, required=True, help="query heads of one GPU")
    it.add_argument("--batch-sizes", type=numbers, default=numbers("1-256"), help="of decode calls (1-256)")
    it.add_argument(
        "--query-tokens", type=numbers, default=(1,), help="of a request; 1,2 with one speculated token (1)"
    )
    it.add_argument("--max-tokens", type=int, default=131_072, help="that a sequence can have (131072)")
    it.add_argument("--no-append", action="store_true", help="the model fills its cache by other means")
    it.add_argument("--num-sms", type=int, default=H100_SMS, help=f"of the GPU ({H100_SMS})")
    it.add_argument("--processes", type=int, help="that compile at a time (one per CPU core)")
    it.add_argument("--list", action="store_true", help="say what is needed and what is there; compile nothing")
    mla = it.add_argument_group("MLA")
    mla.add_argument("--mla", action="store_true", help="multi-head latent attention instead of KV heads")
    mla.add_argument("--topk", type=int, default=2048, help="keys of a query's list (2048)")
    mla.add_argument("--lengths", action="store_true", help="calls have a topk_length")
    mla.add_argument("--dense", action="store_true", help="no lists: block tables")
    mla.add_argument("--flash-mla", action="store_true", help="calls are those of cute_kernels.compat.flash_mla")
    mla.add_argument("--cache-format", choices=tuple(FORMATS), default=V3_2.name, help=f"of the cache ({V3_2.name})")
    mla.add_argument("--extra-cache-format", choices=tuple(FORMATS), help="of a second cache in the same softmax")
    mla.add_argument("--extra-topk", type=int, default=0, help="keys of a query's list in the second cache")
    mla.add_argument("--indexer", choices=SCALE_RULES, help="index_topk, and index_append with this rule of scales")
    mla.add_argument("--index-heads", type=int, help="heads of the indexer: calls are those of index_decode")
    gqa = it.add_argument_group("MHA, GQA, MQA")
    gqa.add_argument("--kv-heads", type=int, help="heads of the cache on one GPU")
    gqa.add_argument("--head-dim", type=int, default=128, help="(128)")
    gqa.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of queries (bfloat16)")
    types = tuple(dict.fromkeys((*CODES, *KINDS)))
    gqa.add_argument("--kv-dtype", choices=types, default="int8", help="of the cache, or a kind of kv_append (int8)")
    gqa.add_argument("--scales", choices=(*SCALES, "none"), default="per_token_head", help="(per_token_head)")
    gqa.add_argument("--scale-dtype", choices=("float32", "float16"), default="float32", help="(float32)")
    gqa.add_argument("--layout", choices=tuple(LAYOUTS), default="paged_NHD", help="of the cache (paged_NHD)")
    gqa.add_argument("--page-size", type=int, default=64, help="(64)")
    gqa.add_argument("--softcap", action="store_true", help="scores are capped")
    gqa.add_argument("--alibi", action="store_true", help="there are ALiBi slopes")
    gqa.add_argument("--blocks", type=int, default=0, help="of the lists that gqa_decode gets as indices (0: none)")
    gqa.add_argument("--index-block", type=int, choices=INDEX_BLOCKS, default=128, help="tokens of a block (128)")
    gqa.add_argument("--prefill", action="store_true", help="sink_attention as well, over packed sequences or a batch")
    gqa.add_argument("--windows", type=windows, default=(None,), help="prefill: of the layers, such as none,128 (none)")
    return it


def shapes_of(options: argparse.Namespace) -> list[Shape]:
    """Returns the shapes that the options name.

    Raises:
        ValueError: neither or both of --mla and --kv-heads are given.
    """
    if options.mla == (options.kv_heads is not None):
        got = "both" if options.mla else "neither"
        raise ValueError(f"--mla, --kv-heads: got {got}; needs one of them")
    append = not options.no_append
    if options.mla:
        shapes: list[Shape] = [_shape(MlaShape, options, append=append, topk=None if options.dense else options.topk)]
        if options.indexer is not None:
            shapes.append(_shape(IndexShape, options, append=append, heads=options.index_heads, scale=options.indexer))
        return shapes
    scales = None if options.scales == "none" else options.scales
    shapes = [_shape(GqaShape, options, append=append, scales=scales)]
    if options.prefill:
        shapes += [_shape(PrefillShape, options, packed=packed) for packed in (False, True)]
    return shapes


def _shape(shape: type[Any], options: argparse.Namespace, **others: Any) -> Any:
    """Makes a shape whose fields are the options of the same names, and `others`."""
    named = {field.name for field in dataclasses.fields(shape)} & vars(options).keys()
    return shape(**{name: getattr(options, name) for name in named} | others)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, or 1 if a kernel is not on disk afterwards."""
    command = parser()
    options = command.parse_args(arguments)
    try:
        shapes = shapes_of(options)
        calls = {
            "batch_sizes": options.batch_sizes,
            "query_tokens": options.query_tokens,
            "num_sms": options.num_sms,
        }
        specs = kernel_specs(*shapes, **calls)
    except ValueError as error:
        command.error(str(error))
    if options.list:
        absent = missing(specs)
        for spec in specs:
            print("to compile" if spec in absent else "on disk   ", entry_name(spec), spec)
        return 1 if absent else 0
    report = warm(*shapes, **calls, processes=options.processes)
    print(report)
    return 1 if report.missing else 0


if __name__ == "__main__":
    sys.exit(main())
