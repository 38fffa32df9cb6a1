"""Invented records of GPU runs, for tests of reports and tables."""

import math
from typing import Any

from bench import records
from tests.kit.compare import Comparison

PASSED = Comparison("case", (), rel_err=0.0021, rel_err_baseline=0.0025, worst=0.4, lse_err=2e-5)
FAILED = Comparison("case", ("out: 3 of 9 elements are wrong",), 0.5, 0.0025, 90.0, math.nan)
SIZES = {"op": "mla_fp8_decode", "mode": "sparse", "batch": 128, "h_q": 128, "s_q": 2, "topk": 2048}
GQA_SIZES = {"batch": 64, "h_q": 32, "h_kv": 8, "d": 128, "s_q": 1, "s_k": 8192}
PER_TENSOR = {"op": "gqa_decode", "kv_dtype": "int8", "scales": "per_tensor", "layout": "BNSH", **GQA_SIZES}
PER_HEAD = {**PER_TENSOR, "scales": "per_token_head", "layout": "paged_NHD", "page_size": 64}
APPEND = {"op": "kv_int8_append", "tokens": 65536, "h_kv": 8, "d": 128, "scales": "per_tensor", "layout": "BNSH"}
SPEED = {"us": 500.123, "us_p10": 499.0, "us_p90": 510.0, "TFLOPs": 292.1, "GBps": 900.0, "read_fraction": 0.2}


def gqa_cases() -> list[dict[str, Any]]:
    """Two variants at several sizes, one case that misses, two whose check failed, and an append."""

    def case(
        key: dict[str, Any], check: Comparison, must: dict[str, float], fraction: float = 0.95, **more: Any
    ) -> dict[str, Any]:
        entry = records.record_case(key, check, lambda: {**SPEED, "read_fraction": fraction, **more})
        return records.with_must(entry, must)

    peers = {"cudnn_bf16": {"us": 900.2, "ratio": 1.8, "rel_err": 0.003}}
    ragged = {"batch": 32, "s_k": "512..16384"}
    copied = {**SPEED, "copy_fraction": 0.85}
    del copied["read_fraction"]
    return [
        case(PER_TENSOR, PASSED, {"read_fraction": 0.9, "ratio": 1.7}, peers=peers),
        case({**PER_TENSOR, "batch": 1, "s_k": 32768}, PASSED, {"us": 26.0}, 0.2, us_p10=1.0, GBps=2000.0),
        case({**PER_TENSOR, **ragged}, PASSED, {"read_fraction": 0.85}, GBps=700.0),
        case(PER_HEAD, PASSED, {"read_fraction": 0.9}, GBps=902.0, host_us=7.5, host_mul_us=6.0),
        case({**PER_HEAD, **ragged}, FAILED, {"read_fraction": 0.85}),
        case({**PER_TENSOR, "kv_dtype": "fp8", "s_q": 4, "window": 128}, FAILED, {"read_fraction": 0.85}),
        records.with_must(records.record_case(APPEND, PASSED, lambda: copied), {"copy_fraction": 0.8}),
    ]


def sink_cases() -> list[dict[str, Any]]:
    """A forward that is good enough, a backward that is not, a failed check, and both routes of two sizes."""
    sizes = {"batch": 4, "h_q": 64, "h_kv": 8, "d": 64, "s_q": 16384, "s_k": 16384}
    forward, backward = ({"op": "sink_attention", "pass": way, **sizes} for way in ("forward", "backward"))
    peers = {"cudnn": {"us": 550.0, "ratio": 1.1, "rel_err": 0.002}}
    routed = {"op": "sink_attention", "pass": "routing", "s_q": 1, "h_q": 64, "h_kv": 8, "d": 64, "batch": 1}
    times = {"us": 5.0, "route": "decode", "decode_us": 5.04, "prefill_us": 9.96}
    return [
        records.with_must(records.record_case(forward, PASSED, lambda: {**SPEED, "peers": peers}), {"ratio": 1.05}),
        records.with_must(
            records.record_case({**backward, "window": 128}, PASSED, lambda: {**SPEED, "us_without_sinks": 497.0}),
            {"us": 260.0},
        ),
        records.with_must(records.record_case({**backward, "deterministic": True}, FAILED, dict), {"TFLOPs": 1.0}),
        *(records.record_case({**routed, "s_k": s_k}, PASSED, lambda: times) for s_k in (64, 8192)),
    ]


def some_record(**changes: Any) -> dict[str, Any]:
    record = {
        "card": "NVIDIA H200",
        "driver": "580.1",
        "torch": "2.11.0",
        "cutlass_dsl": "4.8.1",
        "date": "2026-01-02",
        "source_digest": "0123456789abcdef" * 4,
        "tests": {
            "passed": 278,
            "failed": 0,
            "skipped": 0,
            "sanitizer": {"memcheck": 0, "racecheck": None, "synccheck": 0},
        },
        "ceilings": {"read_GBps": 4323.0, "copy_GBps": 4277.0, "bf16_gemm_TFLOPs": 782.0},
        "cases": [
            records.record_case(SIZES, PASSED, lambda: {**SPEED, "peers": {"flash_mla": {"us": 409.0, "ratio": 0.82}}}),
            records.record_case({**SIZES, "batch": 16}, FAILED, dict),
            records.record_case(
                {"op": "mla_fp8_append", "tokens": 65536}, PASSED, lambda: {**SPEED, "copy_fraction": 0.85}
            ),
            *gqa_cases(),
            *sink_cases(),
        ],
    }
    return {**record, **changes}


TOOLCHAIN = {"cutlass_dsl": "4.8.1", "cuda": "cu13", "compilers": "13.0.88"}
REPR = "MlaAppendSpec(tokens_per_cta={})"


def kernel(number: int, spec: str = "") -> tuple[str, dict[str, str]]:
    """Name and facts of an invented kernel."""
    facts = {"spec": spec or REPR.format(number), "sass": f"{number:064x}", "launch": f"{number + 1:064x}"}
    return records.kernel_id(facts["sass"], facts["launch"]), facts


ACCUMULATOR: dict[str, Any] = {"bits_same": 13, "bits_after": 13, "bits_before": 13, "lost_together": 0.0}
ACCUMULATOR |= {"positive": "truncated", "negative": "truncated"}


def accuracy_rows() -> list[dict[str, Any]]:
    """The entry "accuracy" of a record."""

    def errors(out: float, lse: float) -> dict[str, float]:
        return {"out": out, "lse": lse, "lse_rms": lse / 4, "lse_size": 9.0}

    found = {"exact": errors(1.7e-3, 1e-6), "fp8": errors(1.7e-3, 6e-5), "bf16 keys": errors(2.9e-3, 3e-4)}
    peers = ({"failed": "RuntimeError: no"}, errors(3.1e-3, 2e-4))
    return [
        {"inputs": name, "scales": scales, "errors": {**found, "flash_mla": peer}}
        for name in ("N(0,1)", "outlier channels in k")
        for scales, peer in zip(("arbitrary", "power_of_two"), peers, strict=True)
    ]


def timed_case(**changes: Any) -> dict[str, Any]:
    """A case as they are since each has three times."""
    times = {"us": 300.0, "us_p10": 299.0, "us_p90": 303.0, "us_back_to_back": 296.0, "us_sustained": 340.0}
    times["us_loaded_alone"] = 345.0
    clocks = {"sm_mhz": 1650, "sm_mhz_rested": 1980, "watts": 698, "TFLOPs": 486.0, "GBps": 1400.0}
    peer = {"us": 420.0, "ratio": 1.4, "us_back_to_back": 413.0, "ratio_back_to_back": 1.395, "us_sustained": 425.0}
    peer |= {"us_loaded_alone": 422.0, "ratio_loaded_alone": 1.223}
    peer |= {"ratio_sustained": 1.25, "sm_mhz": 1950, "watts": 610, "rel_err": 0.003}
    entry = records.record_case(SIZES, PASSED, lambda: {**times, **clocks, "peers": {"flash_mla": peer}})
    return {**entry, **changes}


def coded_record(**changes: Any) -> dict[str, Any]:
    """A record as they are since they name machine code: each case has a kernel of its own."""
    record = some_record()
    kernels = dict(kernel(number) for number in range(len(record["cases"])))
    cases = [
        {**case, "kernels": [name], **({} if "failed" in case else {"sets_compared": 2})}
        for case, name in zip(record["cases"], kernels, strict=True)
    ]
    versions = {"tvm_ffi": "0.1.15", "cuda": "13.0", "cudnn": "91900", "python": "3.12.1"}
    record |= {**versions, "toolchain": TOOLCHAIN, "kernels": kernels, "cases": cases}
    return {**record, **changes}


def random_calls(first: int, last: int, **changes: Any) -> dict[str, Any]:
    """The file that a run of random calls writes."""
    entry: dict[str, Any] = {
        "device": "NVIDIA H200",
        "calls": 60_000,
        "invalid_calls": 12_000,
        "wrong": 0,
        "faults": 0,
        "seconds": 100.5,
        "seeds": [[first, last]],
        "shapes": 900 + first,
        "findings": [],
        "toolchain": TOOLCHAIN,
        "kernels": dict([kernel(0), kernel(77)]),
    }
    return {**entry, **changes}
