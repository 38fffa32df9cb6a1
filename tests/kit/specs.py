"""Specs that the tables of bad input and the samples launch, so that tests/gpu compiles them in parallel."""

from typing import Any

from cute_kernels.gqa.append_spec import KvAppendSpec
from cute_kernels.gqa.launch import decode_spec
from cute_kernels.gqa.request import DECODE
from cute_kernels.mla.plan import plan_decode
from tests.kit.bad_input import TABLES
from tests.kit.samples import LONG_SAMPLES, SAMPLES

NUM_SMS = 132


def of_tables() -> list[Any]:
    """Kernels of valid calls. Those of other operators ship or compile in a few seconds."""
    calls = [table.right("cpu") for name, table in TABLES.items() if name.startswith("gqa_decode")]
    per_head = dict.fromkeys(("k_scale", "v_scale"), "per_token_head")
    append = KvAppendSpec.for_launch(dtype="bfloat16", d=64, h_kv=2, **per_head, scale_dtype="float32")
    flash = _flash_decoding(TABLES["flash_mla_with_kvcache"].right("cpu"))
    return [*map(_decoding, [*calls, _decoded(TABLES["sink_attention"].right("cpu"))]), append, flash]


def of_samples() -> list[Any]:
    """Kernels of samples. Those of other operators ship or compile in a few seconds."""
    samples = {**SAMPLES, **LONG_SAMPLES}
    calls = [sample.inputs("cpu") for name, sample in samples.items() if name.startswith("gqa_decode")]
    calls.append(_decoded(LONG_SAMPLES["sink_attention, decoded"].inputs("cpu")))
    # one sample sets num_splits, which decides whether there is a cluster
    own = KvAppendSpec.for_launch(
        dtype="bfloat16", d=64, h_kv=2, k_scale="per_token", v_scale="per_group_32", scale_dtype="float16"
    )
    flash = [_flash_decoding(sample.inputs("cpu")) for name, sample in SAMPLES.items() if name.startswith("flash_mla")]
    return [*map(_decoding, calls), *(_decoding({**call, "num_splits": 2}) for call in calls), own, *flash]


def _decoded(call: dict[str, Any]) -> dict[str, Any]:
    """The request of `gqa_decode` that `sink_attention` makes of a call with few query tokens."""
    return {"q": call["q"], "k_cache": call["k"], "v_cache": call["v"], "s_aux": call["s_aux"], "layout": "BSNH"}


def _decoding(call: dict[str, Any]) -> Any:
    return decode_spec(DECODE.request(**call))


def _flash_decoding(call: dict[str, Any]) -> Any:
    """The kernel of a call of `flash_mla_with_kvcache` over one cache of V3.2."""
    batch, s_q, h_q, _ = call["q"].shape
    indices, length = call.get("indices"), call.get("topk_length")
    max_keys = call["block_table"].shape[1] * call["k_cache"].shape[1] if indices is None else indices.shape[2]
    return plan_decode(
        sparse=indices is not None,
        batch=batch,
        s_q=s_q,
        h_q=h_q,
        max_keys=max_keys,
        num_sms=NUM_SMS,
        ragged=indices is None or length is not None,
        inf_if_empty=True,
    ).spec
