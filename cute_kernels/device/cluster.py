"""Distributed shared memory: reads and writes in other CTAs of the cluster."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32


@cute.jit
def remote_address(pointer: cute.Pointer, rank: Int32):
    """Returns the address of the same variable in the shared memory of CTA `rank` of the cluster."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[Int32(pointer.toint()), rank],
    )


@cute.jit
def remote_value(pointer: cute.Pointer, rank: Int32, dtype: cutlass.Constexpr = Float32):
    """Loads a number of 32 bits, float32 or Int32, from the shared memory of CTA `rank`."""
    kind = "f32" if dtype is Float32 else "b32"
    return cute.arch.inline_ptx(
        f"ld.shared::cluster.{kind} " + "{$w0}, [{$r0}];",
        write_only_types=[dtype],
        read_only_args=[remote_address(pointer, rank)],
    )


@cute.jit
def remote_vector(pointer: cute.Pointer, rank: Int32, dtype: cutlass.Constexpr = Float32, count: cutlass.Constexpr = 4):
    """Loads two or four numbers of 32 bits, float32 or Int32, from the shared memory of CTA `rank`."""
    kind = "f32" if dtype is Float32 else "b32"
    targets = ", ".join(f"{{$w{i}}}" for i in range(count))
    return cute.arch.inline_ptx(
        f"ld.shared::cluster.v{count}.{kind} " + "{" + targets + "}, [{$r0}];",
        write_only_types=[dtype] * count,
        read_only_args=[remote_address(pointer, rank)],
    )


@cute.jit
def send_words(address: Int32, words: tuple, barrier: Int32):
    """Stores four or two words in another CTA asynchronously; their bytes count on a barrier of that CTA.

    address, barrier: from `remote_address`.
    """
    values = ", ".join(f"{{$r{i + 2}}}" for i in range(len(words)))
    cute.arch.inline_ptx(
        f"st.async.shared::cluster.mbarrier::complete_tx::bytes.v{len(words)}.b32 "
        "[{$r0}], {" + values + "}, [{$r1}];",
        read_only_args=[address, barrier, *words],
    )
