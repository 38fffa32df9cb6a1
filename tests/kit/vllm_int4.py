"""Compares codes of vLLM's `int4_per_token_head`, made by its Triton kernel in Triton's interpreter, with ours.

Run it as a program with TRITON_INTERPRET=1 and an empty CUDA_VISIBLE_DEVICES: Triton reads both when vLLM is imported.
"""

import torch
from vllm.v1.attention.ops import int4_per_token_head as theirs

from cute_kernels.gqa.reference import quantize_rotated
from cute_kernels.gqa.rotation_reference import rotate
from tests.kit.draws import generator, integers, normal

TOKENS, HEADS, PAGE = 48, 2, 4
CPU = torch.device("cpu")


def vectors(d: int) -> torch.Tensor:
    """(tokens, heads, d) bfloat16 whose rotations have both signs: all sizes, integers, constants and zeros."""
    gen = generator(d, CPU)
    sizes = torch.logspace(-9, 9, TOKENS, dtype=torch.float32, device=CPU).view(-1, 1, 1)
    x = normal((TOKENS, HEADS, d), gen) * sizes
    x[10:30] = integers(-9, 10, (20, HEADS, d), gen)
    x[30], x[31], x[32] = 2.0, 0.0, -0.0
    x[33:36, :, 7] *= 50
    return x.bfloat16()


def compare(d: int) -> None:
    """Compares codes and scales bit by bit. The rotation is ours: vLLM's rounds to bfloat16 before it quantizes."""
    x = vectors(d)
    y = rotate(x.float())
    shape = TOKENS // PAGE, PAGE, HEADS
    caches = {f"{name}_cache": torch.zeros(*shape, d // 2, dtype=torch.uint8, device=CPU) for name in ("key", "value")}
    scales = {f"{name}_scale_cache": torch.zeros(shape, dtype=torch.float32, device=CPU) for name in "kv"}
    theirs._run_reshape_kernel(
        theirs._reshape_cache_int4_kernel,
        key=y,
        value=y.flip(0),
        **caches,
        **scales,
        slot_mapping=torch.arange(TOKENS, dtype=torch.int64, device=CPU),
        packing_factor=2,
    )
    for given, codes, scale in zip((x, x.flip(0)), caches.values(), scales.values(), strict=True):
        ours, words = quantize_rotated(given)
        assert torch.equal(codes.view_as(ours), ours)
        assert torch.equal(scale.view_as(words).view(torch.int32), words.view(torch.int32))


if __name__ == "__main__":
    for head_dim in (64, 128, 256):
        compare(head_dim)
    print("the same bits")
