"""The oracle of `sink_attention` against a loop, against transformers' gpt-oss, and by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels.sink import reference
from cute_kernels.sink.reference import reference_sink_attention
from tests.kit.mla_cases import covering_cases, generator
from tests.kit.sink_cases import reference_gradients

INF, NAN = math.inf, math.nan
TENSORS = ("q", "k", "v", "s_aux")
SEMANTICS = covering_cases(
    {
        "lengths": (((7, 7),), ((5, 9),), ((9, 5),), ((1, 6), (6, 1)), ((0, 4), (4, 0), (3, 8), (8, 3)), ((6, 0),)),
        "packed": (False, True),
        "ratio": (1, 3),
        "window": (None, 1, 4, 100),
        "causal": (True, False),
        "sink": ("none", "finite", "inf", "large"),
        "scale": (None, 0.3),
    }
)


def inputs(
    lengths: Any,
    *,
    packed: bool = False,
    ratio: int = 2,
    h_kv: int = 2,
    d: int = 8,
    sink: str = "finite",
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments in float64. In a batch that is not packed, all sequences have the first lengths."""
    gen = generator(seed)
    shape_q: tuple[int, ...] = (2, lengths[0][0])
    shape_k: tuple[int, ...] = (2, lengths[0][1])
    rest = {}
    if packed:
        borders = torch.tensor([(0, 0), *lengths]).cumsum(0).int()
        shape_q, shape_k = tuple(borders[-1:, 0].tolist()), tuple(borders[-1:, 1].tolist())
        rest = {"cu_seqlens_q": borders[:, 0], "cu_seqlens_k": borders[:, 1]}
    h_q = h_kv * ratio
    s_aux: Any = None
    if sink != "none":
        s_aux = torch.randn(h_q, generator=gen, dtype=torch.float64)
        s_aux[0], s_aux[-1] = {"finite": (s_aux[0], s_aux[-1]), "inf": (-INF, INF), "large": (80, -80)}[sink]
    return {
        "q": torch.randn(*shape_q, h_q, d, generator=gen, dtype=torch.float64),
        "k": torch.randn(*shape_k, h_kv, d, generator=gen, dtype=torch.float64),
        "v": torch.randn(*shape_k, h_kv, d, generator=gen, dtype=torch.float64),
        "s_aux": s_aux,
        **rest,
    }


def loop(q: Any, k: Any, v: Any, s_aux: Any, window: int | None, causal: bool, scale: float | None) -> Any:
    """Attention of one sequence, query and head at a time, as the documentation says; autograd differentiates it."""
    s_q, h_q, d = q.shape
    s_k, h_kv, _ = k.shape
    scale = 1 / math.sqrt(d) if scale is None else scale
    out, lse = torch.zeros_like(q), q.new_full((s_q, h_q), -INF)
    for j in range(s_q):
        position = s_k - s_q + j
        for h in range(h_q):
            seen = [
                t for t in range(s_k)
                if not (causal and t > position) and not (window is not None and t <= position - window)
            ]  # fmt: skip
            if not seen:
                continue
            head = h // (h_q // h_kv)
            scores = torch.stack([q[j, h] @ k[t, head] * scale for t in seen])
            lse[j, h] = torch.logsumexp(scores, 0)
            if s_aux is not None and s_aux[h] == INF:
                continue
            logits = scores if s_aux is None else torch.cat([scores, s_aux[h : h + 1]])
            weights = torch.softmax(logits, 0)[: len(seen)]
            out[j, h] = weights @ v[seen, head]
    return out, lse


def looped(arguments: dict[str, Any], **options: Any) -> Any:
    q, k, v, s_aux = (arguments[name] for name in TENSORS)
    cu_q, cu_k = arguments.get("cu_seqlens_q"), arguments.get("cu_seqlens_k")
    if cu_q is None or cu_k is None:
        pairs = [loop(*tensors, s_aux, **options) for tensors in zip(q, k, v, strict=True)]
        return tuple(torch.stack(parts) for parts in zip(*pairs, strict=True))
    pairs = [
        loop(q[cu_q[i] : cu_q[i + 1]], *(t[cu_k[i] : cu_k[i + 1]] for t in (k, v)), s_aux, **options)
        for i in range(len(cu_q) - 1)
    ]
    return tuple(torch.cat(parts) for parts in zip(*pairs, strict=True))


def require_equal(arguments: dict[str, Any], *, window: Any = None, causal: bool = True, scale: Any = None) -> None:
    leaves = {name: arguments[name].clone().requires_grad_() for name in TENSORS if arguments[name] is not None}
    expected, expected_lse = looped({**arguments, **leaves}, window=window, causal=causal, scale=scale)
    options = {"window": window, "causal": causal, "softmax_scale": scale}
    out, lse = reference_sink_attention(**arguments, **options)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse.detach(), rtol=1e-11, atol=1e-12)
    dout = torch.randn(out.shape, generator=generator(99), dtype=out.dtype)
    if expected.requires_grad:
        gradients = torch.autograd.grad(expected, leaves.values(), dout, allow_unused=True)
    else:  # no query sees a key
        gradients = (None,) * len(leaves)
    got = dict(zip(TENSORS, reference_gradients(dout, **arguments, **options), strict=True))
    assert (got["s_aux"] is None) == (arguments["s_aux"] is None)
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        wanted = torch.zeros_like(leaf) if gradient is None else gradient
        torch.testing.assert_close(
            got[name], wanted.detach(), rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"d{n}: {m}"
        )


@pytest.mark.parametrize("seed", range(len(SEMANTICS)))
def test_against_the_loop(seed):
    case = SEMANTICS[seed]
    names = ("lengths", "packed", "ratio", "sink")
    options = {name: value for name, value in case.items() if name not in names}
    require_equal(inputs(**{name: case[name] for name in names}, seed=seed), **options)


def test_blocks_of_queries_give_the_same(monkeypatch):
    """A block is one query, as for long sequences."""
    monkeypatch.setattr(reference, "ELEMENTS_PER_CHUNK", 1)
    require_equal(inputs(((5, 9),)), window=4)
    require_equal(inputs(((9, 5),)), causal=False)
    require_equal(inputs(((9, 5), (3, 8), (0, 4), (2, 0)), packed=True))


# ---- gpt-oss of transformers


@pytest.mark.parametrize("sink", ["finite", "large", "-inf"])
@pytest.mark.parametrize(("s_q", "s_k"), [(12, 12), (5, 12), (1, 12)])
@pytest.mark.parametrize("window", [None, 4])
def test_against_gpt_oss(window, s_q, s_k, sink):
    """Transformers' eager attention and masks run in float64 with autograd. Chunked prefill has the last mask rows."""
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    masking = pytest.importorskip("transformers.masking_utils")
    config = modeling.GptOssConfig(sliding_window=window or 1)
    config._attn_implementation = "eager"
    mask_of = masking.create_causal_mask if window is None else masking.create_sliding_window_causal_mask
    whole = torch.zeros(2, s_k, 1, dtype=torch.float64)
    mask = mask_of(config=config, inputs_embeds=whole, attention_mask=None, past_key_values=None)
    assert mask.shape[-2:] == (s_k, s_k)
    arguments = inputs(((s_q, s_k),), ratio=4, d=64, sink="finite" if sink == "-inf" else sink)
    if sink == "-inf":
        arguments["s_aux"][:2] = -INF
    q, k, v, s_aux = leaves = [arguments[name].requires_grad_() for name in TENSORS]
    expected, _ = modeling.eager_attention_forward(
        SimpleNamespace(num_key_value_groups=4, sinks=s_aux, training=True),
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask[:, :, s_k - s_q :], scaling=64**-0.5,
    )  # fmt: skip
    out, _ = reference_sink_attention(q, k, v, s_aux, window=window)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-11, atol=1e-12)
    dout = torch.randn(out.shape, generator=generator(7), dtype=out.dtype)
    wanted = torch.autograd.grad(expected, leaves, dout)
    got: Any = reference_gradients(dout, q, k, v, s_aux, window=window)
    for name, ours, theirs in zip(TENSORS, got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"d{n}: {m}")


# ---- by hand


def numbered(s_q: int, s_k: int) -> dict[str, Any]:
    """Keys with logit 0. Channel k of the value is 1 for key k and 0 for others."""
    return {"q": torch.ones(1, s_q, 1, 8), "k": torch.zeros(1, s_k, 1, 8), "v": torch.eye(s_k, 8).view(1, s_k, 1, 8)}


def shares(s_q: int, s_k: int, **options: Any) -> list[list[float]]:
    out, _ = reference_sink_attention(**numbered(s_q, s_k), **options)
    return [[round(x, 4) for x in row] for row in out[0, :, 0, :s_k].tolist()]


def test_causal_and_window_by_hand():
    assert shares(2, 4) == [[0.3333, 0.3333, 0.3333, 0], [0.25] * 4]
    assert shares(2, 4, causal=False) == [[0.25] * 4, [0.25] * 4]
    assert shares(2, 4, window=2) == [[0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5]]
    assert shares(2, 4, window=1) == [[0, 0, 1, 0], [0, 0, 0, 1]]
    assert shares(2, 4, window=1, causal=False) == [[0, 0, 0.5, 0.5], [0, 0, 0, 1]]
    assert shares(2, 4, window=2**62) == shares(2, 4)
    assert shares(3, 1) == [[0], [0], [1]]


@pytest.mark.parametrize("sink", ["none", "finite", "inf"])
def test_queries_without_keys(sink):
    arguments = inputs(((9, 5),), sink=sink)
    out, lse = reference_sink_attention(**arguments)
    assert (out[:, :4] == 0).all() and (lse[:, :4] == -INF).all()
    assert lse[:, 4:].isfinite().all()
    dout = torch.full_like(out, NAN)  # whatever comes for them has no effect
    dout[:, 4:] = 1
    dq, dk, dv, ds_aux = reference_gradients(dout, **arguments)
    assert (dq[:, :4] == 0).all()
    later = {**arguments, "q": arguments["q"][:, 4:]}
    for got, want in zip((dk, dv, ds_aux), reference_gradients(dout[:, 4:], **later)[1:], strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_nan_stays_where_it_is_seen():
    """A NaN in a key stays with the queries that see it; one in a query or its gradient with the keys that it sees."""
    arguments = inputs(((6, 6), (5, 5)), packed=True)
    clean, clean_lse = reference_sink_attention(**arguments, window=3)
    for name in ("k", "v"):
        broken = arguments[name].clone()
        broken[2] = NAN
        out, lse = reference_sink_attention(**{**arguments, name: broken}, window=3)
        assert out[2:5].isnan().all() and lse[2:5].isnan().all() == (name == "k")
        for got, want in ((out, clean), (lse, clean_lse)):
            torch.testing.assert_close(got[:2], want[:2])
            torch.testing.assert_close(got[5:], want[5:])
    dout = torch.ones_like(clean)
    wanted: Any = reference_gradients(dout, **arguments, window=3)
    dout[4] = NAN
    gradients: Any = reference_gradients(dout, **arguments, window=3)
    for ours, clean_gradient, touched in zip(gradients, wanted, ([4], [2, 3, 4], [2, 3, 4]), strict=False):
        assert ours[touched].isnan().all()
        rest = [i for i in range(11) if i not in touched]
        torch.testing.assert_close(ours[rest], clean_gradient[rest])


def test_float32_on_request():
    arguments = inputs(((6, 9),))
    expected: Any = (
        *reference_sink_attention(**arguments),
        *reference_gradients(arguments["q"], **arguments),
    )
    options = {"dtype": torch.float32}
    out, lse = reference_sink_attention(**arguments, **options)
    got: Any = (out, lse, *reference_gradients(arguments["q"], **arguments, **options))
    for ours, want in zip(got, expected, strict=True):
        assert ours.dtype == torch.float32 and want.dtype == torch.float64
        torch.testing.assert_close(ours.double(), want, rtol=1e-4, atol=1e-5)


def test_lengths_of_one_side_alone():
    arguments = inputs(((3, 3),), packed=True)
    del arguments["cu_seqlens_k"]
    with pytest.raises(ValueError, match="^cu_seqlens_k: got None"):
        reference_sink_attention(**arguments)
