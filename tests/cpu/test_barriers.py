"""Docstrings of kernels show the mbarriers that their initialization reads, as a `table` writes them."""

import inspect
from typing import Any

import pytest

from cute_kernels.runtime import arch

arch.pin()

from cute_kernels.device.pipeline import table  # noqa: E402
from cute_kernels.gqa.kernels import decode as gqa_decode  # noqa: E402
from cute_kernels.gqa.kernels import pipelines as gqa  # noqa: E402
from cute_kernels.gqa.spec import GqaDecodeSpec  # noqa: E402
from cute_kernels.mla.crossover.kernels import decode as crossover_decode  # noqa: E402
from cute_kernels.mla.crossover.kernels import pipelines as crossover  # noqa: E402
from cute_kernels.mla.crossover.spec import MlaCrossoverSpec, shipped_specs  # noqa: E402
from cute_kernels.mla.kernels import decode as mla_decode  # noqa: E402
from cute_kernels.mla.kernels import pipelines as mla  # noqa: E402
from cute_kernels.mla.spec import MlaDecodeSpec  # noqa: E402
from cute_kernels.sink.backward_spec import SinkBackwardSpec, SinkQueryGradSpec  # noqa: E402
from cute_kernels.sink.kernels.backward import SinkBackwardKernel  # noqa: E402
from cute_kernels.sink.kernels.forward import SinkForwardKernel  # noqa: E402
from cute_kernels.sink.kernels.pipelines import key_pipelines, query_pipelines  # noqa: E402
from cute_kernels.sink.kernels.query_grad import SinkQueryGradKernel  # noqa: E402
from cute_kernels.sink.spec import SinkForwardSpec  # noqa: E402

INT8 = GqaDecodeSpec("bfloat16", "int8", 128, 8, k_scales="per_token", v_scales="per_token")
GROUPED = SinkForwardSpec("bfloat16", 64, window=True, warpgroups=4, tile=64, turns=False, grouped=True)
SHOWN = [
    (gqa_decode, "int8, d 128, scales of tokens\n", table(gqa.pipelines(INT8))),
    (gqa_decode, "bfloat16, d 128\n", table(gqa.pipelines(GqaDecodeSpec("bfloat16", "bfloat16", 128, 8)))),
    (mla_decode, "", table(mla.pipelines(MlaDecodeSpec(sparse=False)))),
    (mla_decode, "", table(mla.pipelines(MlaDecodeSpec(sparse=True, heads=16)))),
    (mla_decode, "PV expands\n", table(mla.pipelines(MlaDecodeSpec(sparse=True, cache_format="v4.1_fp4")))),
    (crossover_decode, "", table(crossover.pipelines(MlaCrossoverSpec(sparse=True, exchange="values")))),
    (SinkForwardKernel, "", table(query_pipelines(SinkForwardSpec("bfloat16", 64, warpgroups=3)))),
    (SinkForwardKernel, "", table(query_pipelines(GROUPED))),
    (SinkQueryGradKernel, "", table(query_pipelines(SinkQueryGradSpec("bfloat16", 64)))),
    (SinkBackwardKernel, "", table(key_pipelines(SinkBackwardSpec("bfloat16", 64)))),
    (SinkBackwardKernel, "", table(key_pipelines(SinkBackwardSpec("bfloat16", 128)))),
]
"""The module or class with the docstring, the line before the table, and the table."""


@pytest.mark.parametrize(("shown_by", "title", "shown"), SHOWN)
def test_docstring_shows_the_barriers(shown_by: Any, title: str, shown: str) -> None:
    assert f"{title}{shown}\n" in (inspect.getdoc(shown_by) or "") + "\n"


def test_bytes_cross_on_one_barrier() -> None:
    for spec in shipped_specs():
        crossing = {edge.name: edge.bytes for edge in crossover.pipelines(spec) if edge.bytes and edge.stages > 1}
        assert crossing == ({"keys": 36_864} if spec.exchange == "values" else {"codes": 20_480})
