"""Distributed shared memory: reads and writes in other CTAs of the cluster."""

import cutlass.cute as cute
from cutlass import Float32, Int32


@cute.jit
def remote_address(pointer: cute.Pointer, rank: Int32):
    """The address of the same variable in the shared memory of CTA `rank` of the cluster."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[Int32(pointer.toint()), rank],
    )


@cute.jit
def remote_value(pointer: cute.Pointer, rank: Int32):
    """Loads a float32 from the shared memory of CTA `rank`."""
    return cute.arch.inline_ptx(
        "ld.shared::cluster.f32 {$w0}, [{$r0}];",
        write_only_types=[Float32],
        read_only_args=[remote_address(pointer, rank)],
    )


@cute.jit
def remote_vector(pointer: cute.Pointer, rank: Int32):
    """Loads four float32 from the shared memory of CTA `rank`."""
    return cute.arch.inline_ptx(
        "ld.shared::cluster.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
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


@cute.jit
def remote_words(pointer: cute.Pointer, rank: Int32):
    """Loads four 32-bit words from the shared memory of CTA `rank`."""
    return cute.arch.inline_ptx(
        "ld.shared::cluster.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[remote_address(pointer, rank)],
    )


@cute.jit
def remote_pair(pointer: cute.Pointer, rank: Int32):
    """Loads two 32-bit words from the shared memory of CTA `rank`."""
    return cute.arch.inline_ptx(
        "ld.shared::cluster.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Int32] * 2,
        read_only_args=[remote_address(pointer, rank)],
    )
