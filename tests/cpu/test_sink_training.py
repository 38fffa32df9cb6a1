"""A small gpt-oss model learns with `sink_attention` what it learns with eager attention, and wrong attention shows.

`tests.kit.gpt_oss` describes the measure.
"""

from typing import Any

import pytest

from tests.kit import gpt_oss
from tests.kit.threads import one_thread as one_thread

pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")


def test_follows_the_eager_model():
    gpt_oss.require_learned("cpu")
    loss, sinks = gpt_oss.excess(gpt_oss.attend, "cpu")
    assert loss <= 2, f"losses are off by {loss:.2f} times what bfloat16 is"
    assert sinks <= 2, f"sinks are off by {sinks:.2f} times what bfloat16 is"


def without_gradient(module: Any, *tensors: Any, s_aux: Any, **options: Any) -> Any:
    return gpt_oss.attend(module, *tensors, s_aux=s_aux.detach(), **options)


def without_sink(module: Any, *tensors: Any, s_aux: Any, **options: Any) -> Any:
    return gpt_oss.attend(module, *tensors, s_aux=s_aux * 0 - 1e4, **options)


def window_off_by_one(module: Any, *tensors: Any, sliding_window: Any, **options: Any) -> Any:
    return gpt_oss.attend(module, *tensors, sliding_window=sliding_window and sliding_window + 1, **options)


@pytest.mark.parametrize("wrong", [without_gradient, without_sink, window_off_by_one])
def test_wrong_attention_is_seen(wrong):
    assert max(gpt_oss.excess(wrong, "cpu", seeds=1)) > 2
