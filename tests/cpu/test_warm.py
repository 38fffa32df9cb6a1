"""Warm start: which kernels a model needs, as its operators would request them, and that they end up on disk."""

import os
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cute_kernels
from cute_kernels.gqa import append_op as gqa_append_op
from cute_kernels.gqa import blocks_op
from cute_kernels.gqa import checks as gqa_checks
from cute_kernels.gqa import launch as gqa_launch
from cute_kernels.gqa import request as gqa_request
from cute_kernels.gqa.codes import KINDS
from cute_kernels.indexer import append_op as index_append_op
from cute_kernels.indexer import decode_op as index_decode_op
from cute_kernels.indexer import topk_op
from cute_kernels.indexer.request import APPEND as INDEX_APPEND
from cute_kernels.indexer.request import DECODE as INDEX_DECODE
from cute_kernels.indexer.request import TOPK
from cute_kernels.mla import append_op as mla_append_op
from cute_kernels.mla import checks as mla_checks
from cute_kernels.mla import launch as mla_launch
from cute_kernels.mla.append_spec import MlaAppendSpec
from cute_kernels.mla.request import APPEND, DECODE
from cute_kernels.runtime import compile
from cute_kernels.runtime.cache import entry_name
from cute_kernels.sink import launch as sink_launch
from cute_kernels.sink.op import _launchable
from cute_kernels.sink.request import FORWARD
from cute_kernels.warm import GqaShape, IndexShape, MlaShape, PrefillShape, kernel_specs, warm
from cute_kernels.warm.__main__ import main, numbers, parser, shapes_of
from fp8_mla.formats import FORMATS
from tests.cpu.tiny_spec import TinyShape, TinySpec
from tests.kit.kernel_place import ROOT, Place

SMS = 132
BATCHES = (1, 2, 3, 5, 8, 16, 31, 32, 64, 100, 133, 200, 256)


class Asked(list[Any]):
    """Specs that operators request on a machine without a GPU."""

    def kernel(self, spec: Any) -> Any:
        self.append(spec)
        return lambda *arguments: None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Makes operators believe in a GPU with `SMS` multiprocessors, and keep no prepared launch."""
    found = Asked()
    constants = types.SimpleNamespace(
        num_sms=SMS, no_sink=torch.empty(1024, device="meta"), no_length=torch.empty(1, device="meta")
    )
    keeps_nothing = types.SimpleNamespace(keep=lambda key, prepared, device: prepared)
    for checks in (mla_checks, mla_append_op, gqa_checks, gqa_append_op):
        monkeypatch.setattr(checks, "require_sm90", lambda name, device: None)
    for op in (mla_launch, mla_append_op, gqa_launch, blocks_op, gqa_append_op):
        monkeypatch.setattr(op, "get_kernel", found.kernel)
        monkeypatch.setattr(op, "_prepared", keeps_nothing)
    monkeypatch.setattr(sink_launch, "get_kernel", found.kernel)
    monkeypatch.setattr(sink_launch, "_counters", lambda device: 0)
    monkeypatch.setattr(mla_launch, "_zero_row", lambda device: torch.empty(1))
    monkeypatch.setattr("cute_kernels.runtime.memory.constants", lambda device: constants)
    monkeypatch.setattr("cute_kernels.runtime.memory.unread", lambda shape, device: None)
    monkeypatch.setattr("cute_kernels.runtime.workspace.reserve", lambda device, floats, counters: None)
    return found


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# ---- the specs are those that the ops ask for


def prepare_mla(**given: Any) -> None:
    """Prepares a call of `mla_fp8_decode` on tensors without memory."""
    mla_launch._prepare((), DECODE.request(**given))


@pytest.mark.parametrize("heads, tokens", [(8, 1), (16, 2), (64, 1), (128, 1), (128, 2)])
@pytest.mark.parametrize("shape", [{"topk": 2048}, {"topk": 512, "lengths": True}, {"topk": None, "max_tokens": 8192}])
@pytest.mark.parametrize("flash_mla", [False, True])
def test_mla_shapes_name_what_the_op_prepares(
    asked: Asked, heads: int, tokens: int, shape: dict[str, Any], flash_mla: bool
) -> None:
    shape = {**shape, "flash_mla": flash_mla}
    sparse = shape["topk"] is not None
    cache = meta(2048, 64, 656, dtype=torch.uint8)
    for batch in BATCHES:
        if sparse:
            lengths = {"topk_length": meta(batch, dtype=torch.int32)} if "lengths" in shape else {}
            keys = {"indices": meta(batch, tokens, shape["topk"], dtype=torch.int32), **lengths}
        else:
            table = meta(batch, shape["max_tokens"] // 64, dtype=torch.int32)
            keys = {"block_table": table, "cache_seqlens": meta(batch, dtype=torch.int32)}
        prepare_mla(q=meta(batch, tokens, heads, 576), kv_cache=cache, **keys, inf_if_empty=flash_mla)
    for appended in (1, 100_000):
        slots = meta(appended, dtype=torch.int64)
        mla_append_op._prepare((), APPEND.request(kv=meta(appended, 576), kv_cache=cache, slot_mapping=slots))
    named = kernel_specs(MlaShape(heads, **shape), batch_sizes=BATCHES, query_tokens=(tokens,))
    assert named == list(dict.fromkeys(asked))
    assert len(named) >= 4  # two of the append, and more than one schedule


@pytest.mark.parametrize("max_tokens", [8192, 131_072, 1_048_576])
@pytest.mark.parametrize("tokens", [1, 2])
def test_index_shapes_name_what_the_ops_prepare(
    asked: Asked, max_tokens: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for op in (index_append_op, index_decode_op, topk_op):
        monkeypatch.setattr(op, "require_sm90", lambda name, device: None)
        monkeypatch.setattr(op, "get_kernel", asked.kernel)
        monkeypatch.setattr(op, "_prepared", types.SimpleNamespace(keep=lambda key, prepared, device: prepared))
    for batch in BATCHES:
        logits = meta(batch * tokens, max_tokens, dtype=torch.float32)
        table, lengths = meta(batch, max_tokens // 64, dtype=torch.int32), meta(batch * tokens, dtype=torch.int32)
        request = TOPK.request(logits=logits, lengths=lengths, topk=2048, block_table=table, page_size=64)
        topk_op._prepare((), request)
    cache = meta(9, 64, 132, dtype=torch.uint8)
    q = meta(1, tokens, 32, 128, dtype=torch.float8_e4m3fn)
    weights, lengths = meta(1, tokens, 32, dtype=torch.float32), meta(1, dtype=torch.int32)
    table = meta(1, max_tokens // 64, dtype=torch.int32)
    tensors = {"q": q, "weights": weights, "k_cache": cache, "block_table": table, "cache_seqlens": lengths}
    index_decode_op._prepare((), INDEX_DECODE.request(**tensors))
    asked.pop()  # the choice of the smallest batch, which is known
    slots = meta(7, dtype=torch.int64)
    index_append_op._prepare((), INDEX_APPEND.request(k=meta(7, 128), k_cache=cache, slot_mapping=slots, scale="ue8m0"))
    shape = IndexShape(max_tokens, heads=32, scale="ue8m0")
    assert kernel_specs(shape, batch_sizes=BATCHES, query_tokens=(tokens,)) == list(dict.fromkeys(asked))
    words = f"--heads 128 --mla --indexer ue8m0 --index-heads 32 --max-tokens {max_tokens}"
    assert shapes_of(parser().parse_args(words.split()))[1] == shape
    for wrong in ({"max_tokens": 0}, {"scale": "amax"}, {"heads": 8}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: got"):
            IndexShape(**wrong)


@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize(
    "shape",
    [
        {"topk": 128, "lengths": True, "cache_format": "v4", "extra_cache_format": "v4", "extra_topk": 1024},
        {"topk": 128, "cache_format": "v4.1", "extra_cache_format": "v4.1_fp4", "extra_topk": 512, "flash_mla": True},
        {"topk": None, "max_tokens": 8192, "cache_format": "v3.2_nope"},
    ],
    ids=lambda shape: "-".join(str(value) for value in shape.values()),
)
def test_shapes_of_other_formats_name_what_the_op_prepares(
    asked: Asked, heads: int, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = [shape["cache_format"], *([shape["extra_cache_format"]] if "extra_topk" in shape else [])]
    widths = [shape["topk"] or shape["max_tokens"] // 64, shape.get("extra_topk", 0)]
    caches = [meta(2048, 64, FORMATS[name].token_bytes, dtype=torch.uint8) for name in formats]
    monkeypatch.setattr(mla_launch, "check", lambda request: None)  # memory of such tensors ends early
    monkeypatch.setattr(mla_launch, "check_pages", lambda pages, kind, layout: (pages, kind.page_layout(64, layout)))
    for batch in BATCHES:
        lists = [meta(batch, 1, width, dtype=torch.int32) for width in widths]
        lengths = meta(batch, dtype=torch.int32)
        given = {"q": meta(batch, 1, heads, FORMATS[formats[0]].d_qk), "kv_cache": caches[0]}
        given |= {"cache_format": formats[0], "inf_if_empty": shape.get("flash_mla", False)}
        if shape["topk"] is None:
            given |= {"block_table": lists[0][:, 0], "cache_seqlens": lengths}
        else:
            given |= {"indices": lists[0], **({"topk_length": lengths} if "lengths" in shape else {})}
        if len(formats) > 1:
            given |= {"extra_kv_cache": caches[1], "extra_indices": lists[1], "extra_cache_format": formats[1]}
        prepare_mla(**given)
    named = kernel_specs(MlaShape(heads, append=False, **shape), batch_sizes=BATCHES)
    assert named == list(dict.fromkeys(asked)) and len(named) > 1
    appended = kernel_specs(MlaShape(heads, **shape), batch_sizes=(1,))[-2 * len(set(formats)) :]
    assert set(appended) == {MlaAppendSpec.for_launch(tokens, name) for name in formats for tokens in (1, 65536)}


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"cache_format": "v5"}, "cache_format: got 'v5'; needs one of v3.2, "),
        ({"extra_cache_format": "v4", "extra_topk": 64}, "extra_cache_format: got 'v4' with 'v3.2'; needs "),
        ({"cache_format": "v4", "extra_cache_format": "v4"}, "extra_topk: got 0 with extra_cache_format 'v4'"),
        ({"cache_format": "v4", "extra_topk": 64}, "extra_topk: got 64 with extra_cache_format None"),
        ({"topk": None, "cache_format": "v4", "extra_cache_format": "v4", "extra_topk": 64}, "topk None"),
    ],
)
def test_formats_that_no_kernel_reads_are_refused(shape: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        MlaShape(16, **shape)


def gqa_calls(shape: GqaShape, tokens: int) -> Iterator[dict[str, Any]]:
    """Arguments of `gqa_decode` on tensors without memory."""
    k_dtype, v_dtype = (getattr(torch, name) for name in KINDS.get(shape.kv_dtype, (shape.kv_dtype,) * 2))
    dtypes = {"q": getattr(torch, shape.dtype), "kv": k_dtype}
    paged = shape.layout.startswith("paged")
    for batch in BATCHES:
        if paged:
            cache = meta(40, shape.page_size, shape.kv_heads, shape.head_dim, dtype=dtypes["kv"])
            table = meta(batch, shape.max_tokens // shape.page_size, dtype=torch.int32)
        else:
            cache, table = meta(batch, shape.kv_heads, shape.max_tokens, shape.head_dim, dtype=dtypes["kv"]), None
        scale = None
        values = cache
        if v_dtype is not k_dtype:
            values = meta(*cache.shape[:-1], shape.head_dim // 2, dtype=v_dtype)
        if shape.kv_dtype in KINDS:
            scales = {"per_token_head": cache.shape[:3], "per_tensor": (1,)}[shape.scales or ""]
            scale = meta(*scales, dtype=getattr(torch, shape.scale_dtype))
        q = meta(batch, tokens, shape.heads, shape.head_dim, dtype=dtypes["q"])
        lengths = meta(batch, dtype=torch.int32)
        lists = meta(batch, tokens, shape.kv_heads, shape.blocks, dtype=torch.int32) if shape.blocks else None
        cap = 30.0 if shape.softcap else None
        slopes = meta(shape.heads, dtype=torch.float32) if shape.alibi else None
        yield {
            "q": q, "k_cache": cache, "v_cache": values, "k_scale": scale, "v_scale": scale, "layout": shape.layout,
            "cache_seqlens": lengths, "block_table": table, "softcap": cap, "alibi_slopes": slopes,
            "kind": shape.kv_dtype if v_dtype is not k_dtype else None, "indices": lists,
            "index_block": shape.index_block,
        }  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(
    "shape",
    [
        GqaShape(32, 8),
        GqaShape(32, 8, scale_dtype="float16", max_tokens=4096, page_size=16),
        GqaShape(64, 8, 64, kv_dtype="bfloat16", page_size=16, max_tokens=4096),
        GqaShape(16, 16, 256, dtype="float16", kv_dtype="float16", layout="BNSH", max_tokens=2048),
        GqaShape(32, 8, scales="per_tensor", layout="BNSH", max_tokens=2048, softcap=True, alibi=True),
        GqaShape(32, 8, kv_dtype="fp8_per_token_head"),
        GqaShape(32, 8, kv_dtype="int8_k_int4_v"),
        GqaShape(64, 4, kv_dtype="bfloat16", page_size=128, blocks=16),
        GqaShape(64, 4, page_size=128, blocks=16, index_block=64),
        GqaShape(32, 8, layout="BNSH", max_tokens=2048, blocks=3),
    ],
    ids=str,
)
def test_gqa_shapes_name_what_the_op_prepares(asked: Asked, shape: GqaShape, tokens: int) -> None:
    for arguments in gqa_calls(shape, tokens):
        request = gqa_request.DECODE.request(**arguments)
        if shape.blocks:
            prepared = blocks_op._prepare((), request)
            made = (torch.empty_like(like).contiguous() for like in (prepared.table, prepared.keys))
            request = blocks_op.decode_request(request, prepared, *made)
        gqa_launch._prepare((), request)
        if shape.kv_dtype in KINDS:
            new = meta(7, shape.kv_heads, shape.head_dim, dtype=getattr(torch, shape.dtype))
            slots = meta(7, dtype=torch.int64)
            caches = {name: arguments[name] for name in ("k_cache", "v_cache", "k_scale", "v_scale", "layout")}
            call = {"k": new, "v": new, **caches, "slot_mapping": slots, "kind": shape.kv_dtype}
            gqa_append_op._prepare((), gqa_request.APPEND.request(**call))
    named = kernel_specs(shape, batch_sizes=BATCHES, query_tokens=(tokens,))
    assert len(named) == len(set(named)) and set(named) == set(asked)


def test_small_batches_of_short_sequences_take_a_kernel_of_their_own() -> None:
    """The test above therefore compares more than one decode kernel."""
    named = kernel_specs(GqaShape(32, 8, max_tokens=4096), batch_sizes=BATCHES)
    assert [getattr(spec, "cluster", None) for spec in named] == [8, 4, 1, None]


@pytest.mark.parametrize("packed", [False, True])
def test_prefill_shapes_name_what_the_op_launches(asked: Asked, packed: bool) -> None:
    lengths = meta(3, dtype=torch.int32) if packed else None
    q, k = (meta(2, 8192, heads, 64)[0 if packed else slice(None)] for heads in (64, 8))
    for window in (None, 128, 4096):
        request = _launchable(FORWARD.request(q=q, k=k, v=k, cu_seqlens_q=lengths, cu_seqlens_k=lengths, window=window))
        sink_launch.launch_forward(request, meta(*q.shape), meta(*q.shape[:-1], dtype=torch.float32))
    named = kernel_specs(PrefillShape(64, 8, 64, windows=(None, 128, 4096), packed=packed))
    assert set(named) == set(asked) and len(named) == (4 if packed else 3)


def test_the_number_of_multiprocessors_changes_plans() -> None:
    shape = MlaShape(128, append=False)
    assert kernel_specs(shape, num_sms=20) != kernel_specs(shape, num_sms=SMS)


# ---- what no kernel takes


@pytest.mark.parametrize(
    "shape, arguments, word",
    [
        (MlaShape, {"heads": 129}, "heads: got 129"),
        (GqaShape, {"heads": 30, "kv_heads": 8}, "heads: got 30 over 8"),
        (GqaShape, {"heads": 32, "kv_heads": 8, "layout": "NHD"}, "layout: got 'NHD'"),
        (GqaShape, {"heads": 32, "kv_heads": 8, "scales": "per_row"}, "scales: got 'per_row'"),
        (GqaShape, {"heads": 32, "kv_heads": 8, "scales": None}, "scales: got None"),
        (
            GqaShape,
            {"heads": 32, "kv_heads": 8, "kv_dtype": "int8_k_int4_v", "scale_dtype": "float16"},
            "scales: got float16",
        ),
        (GqaShape, {"heads": 32, "kv_heads": 8, "page_size": 48}, "page_size: got 48"),
        (GqaShape, {"heads": 32, "kv_heads": 8, "kv_dtype": torch.int8}, r"kv_dtype: got torch\.int8; needs the name"),
        (GqaShape, {"heads": 32, "kv_heads": 8, "kv_dtype": "float16"}, "kv_dtype: got 'float16'.*bfloat16"),
        (PrefillShape, {"heads": 3, "kv_heads": 2}, "heads: got 3 over 2"),
    ],
)
def test_shapes_say_what_is_wrong(shape: Any, arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        shape(**arguments)


@pytest.mark.parametrize(
    "arguments, word",
    [
        ({"batch_sizes": ()}, "batch_sizes: got nothing"),
        ({"batch_sizes": (4, 0)}, r"batch_sizes: got \[4, 0\]"),
        ({"query_tokens": (-1,)}, "query_tokens"),
        ({"num_sms": 0}, "num_sms"),
    ],
)
def test_numbers_of_calls_are_checked(arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        kernel_specs(MlaShape(128), **arguments)


def test_query_tokens_are_those_of_gqa_decode() -> None:
    with pytest.raises(ValueError, match="query_tokens: got 9; gqa_decode takes up to 8"):
        kernel_specs(GqaShape(32, 8), query_tokens=(1, 9))
    with pytest.raises(TypeError, match="query_tokens: got 2; needs several numbers"):
        kernel_specs(GqaShape(32, 8), query_tokens=2)


def test_a_shape_without_a_kernel_compiles_nothing(place: Place) -> None:
    with pytest.raises(ValueError, match="d is 96"):
        warm(GqaShape(32, 8, 96))
    assert not place.directory.exists()


# ---- the module and the function


@pytest.mark.parametrize(
    "statement",
    [
        "import cute_kernels",
        "import cute_kernels.warm",
        "from cute_kernels import warm",
        "from cute_kernels.warm import warm",
    ],
)
def test_every_import_gives_something_to_call(statement: str) -> None:
    name = "warm" if statement.startswith("from") else "cute_kernels.warm"
    code = f"{statement}\nimport sys\nprint(callable({name}), 'torch' in sys.modules)"
    run = [sys.executable, "-c", code]
    result = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.stdout.split() == ["True", "False"], result.stderr


# ---- on disk


def test_two_kernels_in_two_processes_and_nothing_again(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    first = cute_kernels.warm(TinyShape(), processes=2)
    assert len(first.specs) == len(first.compiled) == place.compilations() == 2
    assert place.files() == sorted(f"{entry_name(spec)}.so" for spec in first.specs)
    assert first.directory == place.directory and first.missing == ()
    assert "2/2" in capsys.readouterr().err, "the progress bar"
    assert str(first) == f"2 kernels in {place.directory}: 2 compiled in {first.seconds:.1f} s, 0 found"
    again = cute_kernels.warm(TinyShape(), processes=2)
    assert again.compiled == () and place.compilations() == 2 and again.seconds < first.seconds
    for spec in first.specs:
        compile.get_kernel(spec)
    assert place.compilations() == 2
    more = warm(TinyShape((32, 96)), processes=2, progress=False)
    assert more.compiled == (TinySpec(96),) and place.compilations() == 3
    assert capsys.readouterr().err == ""


def test_without_rich_there_is_no_bar(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert len(warm(TinyShape((32,))).compiled) == 1
    assert capsys.readouterr().err == ""


def test_a_daemonic_process_compiles_by_itself(place: Place) -> None:
    """Servers start their workers as daemons, which may have no children."""
    code = """
import multiprocessing
from tests.cpu.tiny_spec import TinyShape
from cute_kernels.warm import warm
def work(queue):
    queue.put(len(warm(TinyShape(), progress=False).compiled))
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,), daemon=True)
    process.start()
    print(queue.get(timeout=100))
"""
    assert place.run(code).split() == ["2"]
    assert place.compilations() == 2


def test_a_cache_that_cannot_be_written_is_reported(place: Place) -> None:
    place.directory.write_text("a file where the directory should be")
    with pytest.warns(RuntimeWarning, match="cannot be kept|not used"):
        report = warm(TinyShape(), progress=False)
    assert report.compiled == () and len(report.missing) == 2 and "2 could not be kept" in str(report)


def test_the_command_warms_a_model(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The two kernels are the decode of batch 64 over INT8, and its append."""
    arguments = ["--heads", "32", "--kv-heads", "8", "--batch-sizes", "64", "--processes", "2"]
    assert main([*arguments, "--list"]) == 1
    assert capsys.readouterr().out.count("to compile") == 2 and not place.directory.exists()
    command = [sys.executable, "-m", "cute_kernels.warm", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    first = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stderr
    assert f"2 kernels in {place.directory}: 2 compiled in" in first.stdout
    assert len(place.files()) == 2
    assert main(arguments) == 0
    again = capsys.readouterr().out
    assert "0 compiled" in again and "2 found" in again
    assert main([*arguments, "--list"]) == 0


@pytest.mark.parametrize("arguments", [["--heads", "128"], ["--heads", "128", "--mla", "--kv-heads", "8"], ["--mla"]])
def test_the_command_explains_itself(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2 and "--" in capsys.readouterr().err


def test_the_command_knows_flash_mlas_interface() -> None:
    shapes = [shapes_of(parser().parse_args(["--heads", "16", "--mla", *more])) for more in ((), ("--flash-mla",))]
    assert shapes == [[MlaShape(16)], [MlaShape(16, flash_mla=True)]]


def test_the_command_knows_two_caches() -> None:
    options = "--heads 16 --mla --topk 128 --lengths --cache-format v4 --extra-cache-format v4 --extra-topk 1024"
    two = {"cache_format": "v4", "extra_cache_format": "v4", "extra_topk": 1024}
    assert shapes_of(parser().parse_args(options.split())) == [MlaShape(16, 128, lengths=True, **two)]


def test_numbers_and_ranges() -> None:
    assert numbers("1,2,8-10") == (1, 2, 8, 9, 10)
    assert numbers("5") == (5,)
