"""Keys of prepared launches cover what a compiled kernel does not check, and each call compares addresses.

A key is made before a kernel is looked up, so none of this needs a GPU. Most mutants of a key would write past memory.
"""

from typing import Any, NoReturn

import pytest
import torch

from cute_kernels.gqa import append_op as kv_append_op
from cute_kernels.gqa import blocks_op
from cute_kernels.gqa import launch as gqa_launch
from cute_kernels.gqa import op as gqa_op
from cute_kernels.merge import op as merge_op
from cute_kernels.mla import append_op
from cute_kernels.mla import launch as mla_launch
from cute_kernels.mla import op as mla_op
from cute_kernels.runtime import ops, workspace
from cute_kernels.sink import op as sink_op
from cute_kernels.sink.request import FORWARD
from tests.cpu.launch_calls import BF16, CALLS, CHANGES, I32, KV_APPEND, MERGED, U8, Call, imaginary, negated
from tests.kit.bad_input import TABLES
from tests.kit.prepared import launch_of, prepare


class Found(Exception):
    """Holds the key that was looked up."""


class Keys(dict[Any, Any]):
    def get(self, key: Any, default: Any = None) -> NoReturn:
        raise Found(key)


def key_of(module: Any, request: Call) -> Any:
    """The key under which a module looks up a prepared launch."""
    known, module._prepared = module._prepared, Keys()
    try:
        launch_of(module)(request)
    except Found as found:
        return found.args[0]
    finally:
        module._prepared = known
    raise AssertionError("nothing was looked up")


@pytest.mark.parametrize(("name", "what"), [(name, what) for name, changes in CHANGES.items() for what in changes])
def test_another_key_for(name: str, what: str) -> None:
    module, call = CALLS[name]
    changed = {**call, **CHANGES[name][what]}
    keys = [key_of(module, request) for request in (call, changed, dict(call))]
    assert keys[0] == keys[2] and hash(keys[0]) == hash(keys[2])
    assert keys[0] != keys[1]


@pytest.mark.parametrize(("name", "output"), [("gqa", "out"), ("gqa", "lse"), ("mla", "out"), ("merge", "out")])
def test_each_distance_of_rows_of_an_output_has_a_key(name: str, output: str) -> None:
    module, call = CALLS[name]
    rows = call[output].new_zeros(9, *call[output].shape[1:])
    outputs = (call[output], rows[::2][: len(call[output])], rows[::3][: len(call[output])])
    assert len({key_of(module, {**call, output: each}) for each in outputs}) == len({t.stride() for t in outputs})


# ---- what is compared in each call


class Kernel:
    """Stands for a compiled kernel that takes everything."""

    def __init__(self) -> None:
        self.launches = 0

    def __call__(self, *arguments: Any, **named: Any) -> None:
        self.launches += 1


NEED = workspace.Need(torch.device("cpu"), 0, 0, None)
NONE, LENGTH, LSE = torch.zeros(4), torch.ones(2, dtype=I32), torch.zeros(2, 1, 4)


def prepared_of(name: str, kernel: Kernel) -> Any:
    if name == "blocks":
        views = (blocks_op.Strided("k_cache", "pthd", (6, 128, 1, 64), (8192, 64, 64, 1)),)
        rows = torch.zeros(4, 3, dtype=I32)
        return blocks_op.PreparedLaunch(kernel, "paged_NHD", views, 4, rows, rows[:, 0], LENGTH, set())
    if name == "gqa":
        return gqa_launch.PreparedLaunch(kernel, NEED, NONE, LENGTH, LSE, set())
    if name in ("mla", "latent"):
        out = CALLS[name][1]["out"]
        return mla_launch.PreparedLaunch(kernel, (0,), False, NEED, NONE, LENGTH.unsqueeze(1), out, LSE, set())
    if name == "merge":
        return merge_op.PreparedLaunch(kernel, MERGED["out"], MERGED["lse"], set())
    if name == "kv append":
        return kv_append_op.PreparedLaunch(kernel, None, set())
    return kernel


RUN = {
    "gqa": gqa_op._decode_on_gpu,
    "blocks": gqa_op._decode_blocks_on_gpu,
    "mla": mla_op._decode_on_gpu,
    "latent": mla_op._decode_on_gpu,
    "merge": merge_op._merge_or_explain,
    "append, v3.2": append_op._append,
    "kv append": kv_append_op._append,
}


def same_bytes(like: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The last elements of another tensor's memory, with the shape and dtype of the first one."""
    flat = other.flatten().view(U8)
    return flat[-like.nbytes :].view(like.dtype).view(like.shape)


def inside(name: str, one: str, other: str) -> Call:
    """The smaller of two arguments, placed in the memory of the larger one."""
    call = CALLS[name][1]
    small, large = sorted((one, other), key=lambda argument: call[argument].nbytes)
    return {small: same_bytes(call[small], call[large])}


PAIRS = {
    "blocks": [("out", "lse"), ("out", "k_cache"), ("lse", "indices"), ("lse", "cache_seqlens")],
    "gqa": [("out", "lse"), *(("out", name) for name in ("k_cache", "v_cache")), ("lse", "alibi_slopes")],
    "mla": [("out", "lse"), ("out", "q"), ("out", "kv_cache"), ("lse", "indices")],
    "latent": [("out", "lse"), ("out", "kv_cache"), ("lse", "indices")],
    "merge": [("out", "lse"), ("out", "outs"), ("lse", "lses")],
    "append, v3.2": [("kv_cache", "kv"), ("kv_cache", "slot_mapping")],
    "kv append": [("k_cache", "v_cache"), ("k_scale", "v_scale"), ("k_cache", "v"), ("v_scale", "slot_mapping")],
}


@pytest.mark.parametrize(("name", "pair"), [(name, pair) for name, pairs in PAIRS.items() for pair in pairs])
def test_a_prepared_launch_compares_addresses(
    name: str, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes and strides stay, so that the key stays."""
    module, call = CALLS[name]
    kernel = Kernel()
    monkeypatch.setattr(blocks_op, "decode", lambda request: (request["out"], request["lse"]))
    prepare(monkeypatch, module, prepared_of(name, kernel), call)
    RUN[name](call)
    assert kernel.launches == 2
    with pytest.raises(ValueError, match=rf"^{pair[0]}: got memory that is also {pair[1]}'s; needs memory of its own"):
        RUN[name]({**call, **inside(name, *pair)})
    assert kernel.launches == 2
    assert len(module._prepared) == 1


@pytest.mark.parametrize("name", ["gqa", "latent"])
def test_a_prepared_launch_takes_q_as_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, call = CALLS[name]
    kernel = Kernel()
    launch = prepared_of(name, kernel)
    prepare(monkeypatch, module, launch, call)
    for out in (call["q"], call["q"].view(call["q"].shape)):
        RUN[name]({**call, "out": out})
    assert kernel.launches == 3
    rows = call["q"].new_zeros(4, *call["q"].shape[1:])
    out = rows[:2]
    launch.apart.clear()
    RUN[name]({**call, "q": out, "out": out})
    assert launch.apart, "the next call is not compared"
    with pytest.raises(ValueError, match="^out: got memory that is also q's"):
        RUN[name]({**call, "q": rows[::2], "out": out})  # it begins where that q did
    assert kernel.launches == 4
    RUN[name]({**call, "q": out, "out": rows[2:]})
    with pytest.raises(ValueError, match="^out: got memory that is also q's"):
        RUN[name]({**call, "q": rows[::2], "out": rows[2:]})  # both begin where they did
    assert kernel.launches == 5


def test_addresses_of_several_storages_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, looked = Kernel(), []

    def look(written: Any, addresses: Any) -> bool:
        looked.append(addresses)
        return False

    monkeypatch.setattr(ops, "_KEPT", 2)
    monkeypatch.setattr(ops, "share_storage", look)
    launch = prepared_of("merge", kernel)
    prepare(monkeypatch, merge_op, launch, MERGED)
    outputs = [torch.zeros_like(MERGED["out"]) for _ in range(3)]
    for out in (*outputs, outputs[2]):
        RUN["merge"]({**MERGED, "out": out})
        assert len(launch.apart) <= 2
    assert len(looked) == 1 + len(outputs)


@pytest.mark.parametrize(
    ("name", "argument"),
    [("gqa", "lse"), ("gqa", "k_scale"), ("gqa", "v_scale"), ("mla", "lse"), ("latent", "lse"), ("merge", "lses"),
     ("merge", "lse"), ("merge", "s_aux"), ("kv append", "k_scale"), ("kv append", "v_scale")],
)  # fmt: skip
def test_a_prepared_launch_sees_a_sign(name: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, call = CALLS[name]
    call = {**call, argument: imaginary(torch.zeros(4) if call[argument] is None else call[argument])}
    kernel = Kernel()
    prepare(monkeypatch, module, prepared_of(name, kernel), call)
    with pytest.raises(ValueError, match=rf"^{argument}: got a view with its neg bit set"):
        RUN[name]({**call, argument: negated(call[argument])})
    assert kernel.launches == 1


ONE_HEAD: dict[str, Call] = {
    "gqa": {
        **dict.fromkeys(("q", "out"), torch.zeros(1, 1, 1, 64, dtype=BF16)),
        **dict.fromkeys(("k_cache", "v_cache"), torch.zeros(1, 1, 16, 64, dtype=torch.int8)),
        **dict.fromkeys(("k_scale", "v_scale"), torch.ones(1, 1, 16)),
        "cache_seqlens": torch.ones(1, dtype=I32),
        "alibi_slopes": None,
    },
    "mla": {
        "q": torch.zeros(1, 1, 1, 576, dtype=BF16),
        "indices": torch.zeros(1, 1, 5, dtype=I32),
        "out": torch.zeros(1, 1, 1, 512, dtype=BF16),
    },
    "merge": {"outs": torch.zeros(2, 1, 1, 64), "lses": torch.zeros(2, 1, 1), "out": torch.zeros(1, 1, 64)},
}


@pytest.mark.parametrize("argument", ["lse", "s_aux"])
@pytest.mark.parametrize("name", list(ONE_HEAD))
def test_a_prepared_launch_sees_the_sign_of_one_number(
    name: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch calls it contiguous, and kernels do not check the stride of a size of 1."""
    module, call = CALLS[name]
    call = {**call, **ONE_HEAD[name]}
    call |= {"lse": torch.zeros(call["out"].shape[:-1]), "s_aux": torch.zeros(1)}
    kernel = Kernel()
    prepare(monkeypatch, module, prepared_of(name, kernel), call)
    RUN[name](call)
    with pytest.raises(ValueError, match=rf"^{argument}: got a view with its neg bit set"):
        RUN[name]({**call, argument: negated(call[argument])})
    assert kernel.launches == 2


@pytest.mark.parametrize("name", ["gqa", "mla", "latent"])
@pytest.mark.parametrize("option", [{"causal": "no"}, {"softmax_scale": float("nan")}, {"num_splits": True}])
def test_a_prepared_launch_looks_at_options(name: str, option: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    module, call = CALLS[name]
    call, kernel = {**call, "softmax_scale": 0.125, "num_splits": 1}, Kernel()
    prepare(monkeypatch, module, prepared_of(name, kernel), call)
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(option))}: got"):
        RUN[name]({**call, **option})
    assert kernel.launches == 1


def test_caches_that_lie_in_turn_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of all layers lie in one tensor, and a distance that was compared is not compared again."""
    kernel, looked = Kernel(), []
    layers = torch.zeros(3, 2, 2, 2, 16, 64, dtype=torch.int8)
    calls = [{**KV_APPEND, "k_cache": layer[0], "v_cache": layer[1]} for layer in layers]
    scales = torch.ones(3, 2, 2, 2, 16)
    for call, pair in zip(calls, scales, strict=True):
        call |= {"k_scale": pair[0], "v_scale": pair[1]}
    prepare(monkeypatch, kv_append_op, prepared_of("kv append", kernel), calls[0])
    monkeypatch.setattr(kv_append_op, "check", lambda request: looked.append(request))
    for call in calls * 2:
        kv_append_op._append(call)
    assert kernel.launches == 7
    assert len(looked) == 2, "scales are as far from the second and the third layer's keys only once each"


# ---- what goes to a kernel without its own checks


def test_only_what_the_prefill_would_take_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gqa_decode` takes rows of 8 bytes and codes, but `sink_attention` refuses them for any number of tokens."""
    monkeypatch.setattr(sink_op, "_decode", lambda request: "decoded")
    call = TABLES["sink_attention"].right("cpu")
    q, k, v = (call[name] for name in "qkv")

    def decoded(q: torch.Tensor, k: torch.Tensor) -> bool:
        return sink_op._decode_if_few(FORWARD.request(q=q, k=k, v=v, return_lse=False)) == "decoded"

    wide = q.new_zeros((*q.shape[:-1], 80))
    assert decoded(q, k) and decoded(wide[..., :64], k)
    assert wide.data_ptr() % 16 == 0
    assert not decoded(wide[..., 4:68], k)
    assert not decoded(q.new_zeros((*q.shape[:-1], 68))[..., :64], k)
    assert not decoded(q, k.to(torch.int8)) and not decoded(q, k.half())
