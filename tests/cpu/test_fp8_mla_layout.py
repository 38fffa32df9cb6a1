"""The constants of the layout, and which tensors are accepted as a cache."""

import numpy as np
import pytest
import torch

import fp8_mla

# the layout once more, so that a wrong offset shows
TOKEN = np.dtype([("codes", "u1", 512), ("scales", "<f4", 4), ("rope", "<u2", 64)])


def test_constants_describe_the_656_byte_token():
    assert fp8_mla.TOKEN_BYTES == TOKEN.itemsize == 656
    offsets = {name: field[1] for name, field in (TOKEN.fields or {}).items()}
    assert offsets == {
        "codes": fp8_mla.CODE_OFFSET,
        "scales": fp8_mla.SCALE_OFFSET,
        "rope": fp8_mla.ROPE_OFFSET,
    }
    assert (fp8_mla.CODE_OFFSET, fp8_mla.SCALE_OFFSET, fp8_mla.ROPE_OFFSET) == (0, 512, 528)
    assert (fp8_mla.NOPE_DIM, fp8_mla.ROPE_DIM, fp8_mla.QK_DIM, fp8_mla.V_DIM) == (512, 64, 576, 512)
    assert (fp8_mla.QUANT_TILE, fp8_mla.NUM_SCALES) == (128, 4)
    assert torch.finfo(torch.float8_e4m3fn).max == fp8_mla.FP8_MAX == 448.0
    assert torch.finfo(torch.float32).tiny == fp8_mla.MIN_SCALE


def test_pack_puts_every_field_where_the_constants_say():
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(5, 576, generator=generator).bfloat16()
    tokens = fp8_mla.pack(kv).numpy().view(TOKEN).squeeze(-1)
    tiles = kv[:, :512].float().view(5, 4, 128)
    np.testing.assert_array_equal(tokens["scales"], tiles.abs().amax(-1).numpy() / np.float32(448))
    np.testing.assert_array_equal(tokens["rope"], kv[:, 512:].contiguous().view(torch.uint16).numpy())
    codes = torch.from_numpy(tokens["codes"].copy()).view(torch.float8_e4m3fn).float()
    assert torch.equal(codes.view(5, 4, 128).abs().amax(-1), torch.full((5, 4), 448.0))
    assert torch.equal(codes.sign(), kv[:, :512].float().sign() * (codes != 0))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(3, 7, 656), (3, 7, 1, 656), (1, 1, 656), (0, 4, 656), (3, 1, 1, 656)])
def test_as_pages_is_a_view(shape, dtype):
    cache = torch.zeros(shape, dtype=torch.uint8).view(dtype)
    pages = fp8_mla.as_pages(cache)
    assert pages.dtype == torch.uint8
    assert tuple(pages.shape) == (shape[0], shape[1], 656)
    assert pages.data_ptr() == cache.data_ptr()


def test_as_pages_keeps_strides():
    wide = torch.zeros(3, 9, 2, 700, dtype=torch.uint8)
    pages = fp8_mla.as_pages(wide[:, :7, 1:, :656])
    assert tuple(pages.shape) == (3, 7, 656)
    assert pages.stride() == (9 * 1400, 1400, 1)
    pages.fill_(1)
    assert wide.sum() == 3 * 7 * 656


@pytest.mark.parametrize(
    ("cache", "error", "got"),
    [
        (torch.zeros(2, 4, 656), TypeError, "float32"),
        (torch.zeros(2, 4, 656, dtype=torch.int8), TypeError, "int8"),
        (torch.zeros(2, 4, 656, dtype=torch.uint8).view(torch.float8_e5m2), TypeError, "float8_e5m2"),
        (torch.zeros(2, 4, 576, dtype=torch.bfloat16), TypeError, "bfloat16"),
        (None, TypeError, "None"),
        (torch.zeros(2, 4, 655, dtype=torch.uint8), ValueError, r"\(2, 4, 655\)"),
        (torch.zeros(4, 656, dtype=torch.uint8), ValueError, r"\(4, 656\)"),
        (torch.zeros(2, 4, 2, 656, dtype=torch.uint8), ValueError, r"\(2, 4, 2, 656\)"),
        (torch.zeros(1, 2, 4, 1, 656, dtype=torch.uint8), ValueError, r"\(1, 2, 4, 1, 656\)"),
        (torch.zeros(2, 0, 656, dtype=torch.uint8), ValueError, r"\(2, 0, 656\)"),
        (torch.zeros((), dtype=torch.uint8), ValueError, r"\(\)"),
        (torch.zeros(2, 4, 1312, dtype=torch.uint8)[..., ::2], ValueError, "strides"),
        (torch.zeros(2, 656, 4, dtype=torch.uint8).transpose(1, 2), ValueError, "strides"),
    ],
)
def test_as_pages_refuses(cache, error, got):
    with pytest.raises(error, match=rf"kv_cache: got .*{got}.*; needs "):
        fp8_mla.as_pages(cache)


@pytest.mark.parametrize(("shape", "strides"), [((2, 4, 656), (0, 656, 1)), ((2, 4, 656), (4 * 656, 640, 1))])
def test_tokens_are_not_written_where_slots_share_memory(shape, strides):
    cache = torch.zeros(2 * 4 * 656, dtype=torch.uint8).as_strided(shape, strides)
    tokens, slots = torch.ones(2, 656, dtype=torch.uint8), torch.tensor([0, 4])
    assert not fp8_mla.read_pages(cache, slots).any()
    with pytest.raises(ValueError, match="kv_cache: got strides .*, with which slots share memory; needs"):
        fp8_mla.write_pages(cache, slots, tokens)
    assert not cache.any()


def test_nested_tensors_are_refused_in_words():
    nested = torch.nested.nested_tensor([torch.zeros(4, 656), torch.zeros(4, 656)])
    slots, cache = torch.tensor([0]), torch.zeros(2, 4, 656, dtype=torch.uint8)
    codes, numbers = nested.to(torch.uint8), nested.to(torch.int64)
    for function, arguments in (
        (fp8_mla.pack, (nested,)),
        (fp8_mla.unpack, (codes,)),
        (fp8_mla.as_pages, (codes,)),
        (fp8_mla.row_views, (codes,)),
        (fp8_mla.read_pages, (codes, slots)),
        (fp8_mla.read_pages, (cache, numbers)),
        (fp8_mla.write_pages, (cache, slots, codes)),
        (fp8_mla.reference_decode, (nested, cache)),
        (fp8_mla.reference_decode, (torch.zeros(1, 1, 8, 576), codes)),
    ):
        with pytest.raises((TypeError, ValueError), match=r"^\w+: got a nested tensor; needs"):
            function(*arguments)


def test_options_of_the_reference_are_checked():
    call = {"q": torch.zeros(1, 1, 8, 576), "kv_cache": torch.zeros(2, 4, 656, dtype=torch.uint8),
            "indices": torch.zeros(1, 1, 3, dtype=torch.int32)}  # fmt: skip
    with pytest.raises(TypeError, match="causal: got 'no'; needs a bool"):
        fp8_mla.reference_decode(**call, causal="no")
    with pytest.raises(ValueError, match="softmax_scale: got nan; needs a finite"):
        fp8_mla.reference_decode(**call, softmax_scale=float("nan"))
