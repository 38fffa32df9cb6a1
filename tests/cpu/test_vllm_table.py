"""Tables and plots of vLLM from a made-up run of scripts/vllm_check.py."""

from typing import Any

from bench.report import vllm


def cases(ms: float, contexts: tuple[int, ...] = (1024, 8192)) -> list[dict[str, Any]]:
    """Cases of batch 1 and 64. The second batch and context each take twice as long."""
    return [
        {"context": c, "batch": b, "ms": ms * (1 + i) * (1 + j), "attention_ms": ms * (1 + i) * (1 + j) / 2}
        for i, c in enumerate(contexts)
        for j, b in enumerate((1, 64))
    ]


def made_up() -> dict[str, Any]:
    """A run in which one backend failed and some parts were left out."""
    partial = cases(1.5)[:3]
    del partial[0]["attention_ms"]
    return {
        "card": "NVIDIA H200", "date": "2026-01-02", "versions": {"vllm": "0.26.0", "torch": "2.11.0"},
        "tokens": {
            "engines": {
                "llama-int8_per_token_head-graphs": {"runner": 2, "done": True, "wrong_requests": [0, 0, 0]},
                "gpt_oss-auto-eager": {"runner": 1, "failures": ["x"], "wrong_requests": [0, 3, 0]},
                "llama-fp8-graphs": {"failures": ["no engine"]},
            }
        },
        "speed": {
            "layers": 4,
            "backends": {
                "cute-int8": {"cases": cases(1.0)}, "triton-int8": {"cases": cases(2.5)},
                "cute-bf16": {"cases": cases(1.6)}, "flash-bf16": {"cases": partial},
                "cute-fp8": {"cases": cases(1.1)}, "flash-fp8": {"failures": ["no engine"]},
            },
        },
        "sparse": {
            "cases": [
                {"heads": 8, "requests": 16, "tokens": 32, "ours_us": 20.0, "flashmla_us": 50.0, "difference": 1.2e-3},
                {"heads": 128, "requests": 1, "tokens": 2, "ours_us": 20.0, "flashmla_us": "RuntimeError: no"},
            ]
        },
        "first": {
            "layers": 4,
            "backends": {
                "cute-int8": {"cases": [{"requests": 1, "tokens": 8192, "ms": 40.0}]},
                "triton-int8": {"cases": [{"requests": n, "tokens": 8192, "ms": 100.0} for n in (1, 4)]},
                "cute-bf16": {"cases": [{"requests": 1, "tokens": 8192, "ms": 40.0}]},
            },
        },
        "prompts": {
            "cases": [
                {"requests": 1, "context": 0, "tokens": 2048, "sink_attention_us": 100.0, "flash_fresh_us": "no"},
                {"requests": 1, "context": 64, "tokens": 16, "ours_auto_us": 5.0, "ours_int8_per_token_head_us": 7.0},
            ]
        },
        "wrong": ["layers: needs 60 s,\n 3 s were left"],
    }  # fmt: skip


def test_the_tables_show_each_pair() -> None:
    text = "\n".join(vllm.page([made_up()]))
    assert "NVIDIA H200, 2026-01-02, vllm 0.26.0, torch 2.11.0:" in text
    assert "| int8_per_token_head, Triton | 64 x 8192 | 4 | 10 | 2.50 x | 2 | 5 | 2.50 x |" in text
    assert "| bf16, FlashAttention 3 | 1 x 1024 | 1.6 | 1.5 | 0.94 x | 0.8 | – | – |" in text
    assert "| bf16, FlashAttention 3 | 64 x 8192 | 6.4 | – | – | 3.2 | – | – |" in text
    assert "fp8, FlashAttention 3" not in text  # it has no case
    assert "less time than on the other backend in 2 of 3 cases; over INT8, at most 1/2 of it in 2 of 2." in text
    assert "| llama, int8_per_token_head | graphs | 2 | 0, 0, 0 |" in text
    assert "| gpt_oss, auto | eager | 1 | 0, 3, 0 |" in text and "llama, fp8" not in text
    assert "| 8 | 16 | 20 | 50 | 2.50 x | 1.2e-03 |" in text
    assert "| 128 | 1 | 20 | – | – | – |" in text
    assert "| 1 x 2048 | – | 100 | – | – |" in text
    assert "| 1 x 16, 64 | 5 | – | – | – | 7 | – |" in text
    assert "| int8_per_token_head, Triton | 1 x 8192 | 40 | 100 | 2.50 x |" in text
    assert "| 4 x 8192" not in text and "| bf16, FlashAttention 3 | 1 x 8192 | 40 |" not in text, "it has no pair"
    assert "Failed or left out: layers: needs 60 s, 3 s were left." in text


def test_what_two_kernels_answered_is_said_in_words() -> None:
    indexed = {"calls": 3, "rows": 20, "rows_with_others": 1, "furthest_below": 2**-20, "largest_score": 4.0}
    engines = {"a": {"start_s": 9.0, "shadow": {"calls": 5, "apart": 0.004}}, "b": {"shadow": indexed}}
    said = vllm.mla_started({"mla-tokens": {"engines": engines}})
    assert "In 5 calls rows of FlashMLA's output are at most 0.004 away." in said
    assert (
        "Our indexer chose 20 rows of keys; in 1 of them DeepGEMM's scores prefer another key, by at most 9.5" in said
    )
    ties = {**indexed, "rows_with_others": 0, "rows_with_ties": 7, "theirs_with_others": 2}
    said = vllm.shadow(ties)
    assert "20 rows of keys, none of which lacks a key that DeepGEMM's scores prefer. 7 of them end among" in said
    assert said.endswith("it lacked a key in 2.")


def test_what_was_not_measured_has_no_table() -> None:
    few = {key: value for key, value in made_up().items() if key in ("card", "date", "versions")}
    assert vllm.page([few]) == ["NVIDIA H200, 2026-01-02, vllm 0.26.0, torch 2.11.0:"]
    assert vllm.page([]) == vllm.speeds([]) == vllm.speeds([few]) == []
