"""Dev: the latent kernel against float64."""
import sys, time, itertools
import torch
from cute_kernels.mla.plan import plan_decode
from cute_kernels.runtime import memory, workspace
from cute_kernels.runtime.compile import get_kernel
from cute_kernels.mla.spec import PARTIAL_FLOATS
from fp8_mla.formats import FORMATS

DEV = "cuda"

def make_cache(fmt, pages, page_size, gen, scale_lo=115, scale_hi=124, planar=True, pad=0):
    f = FORMATS[fmt]
    lay = f.page_layout(page_size)
    stride = -(-(lay.page_bytes + pad) // 576) * 576
    mem = torch.randint(0, 256, (pages, stride), dtype=torch.uint8, device=DEV, generator=gen)
    n = pages * page_size
    tok = torch.arange(n, device=DEV)
    page, off = tok // page_size, tok % page_size
    flat = mem.view(-1)
    db = f.codes.num_bytes
    def put(base, data):
        idx = base[:, None] + torch.arange(data.shape[1], device=DEV)
        flat[idx] = data
    data_base = page * stride + off * lay.data_stride
    scale_base = page * stride + lay.scale_offset + off * lay.scale_stride
    codes = torch.randint(0, 256, (n, db), dtype=torch.uint8, device=DEV, generator=gen)
    if fmt != "v4.1_fp4":
        codes[(codes & 0x7F) == 0x7F] = 0x11
        x = torch.randn((n, f.codes.count), device=DEV, generator=gen) * 100
        codes = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    put(data_base, codes)
    ns = f.num_scales
    if fmt == "v4.1_fp4":
        sc = (torch.rand((n, ns), device=DEV, generator=gen) + 0.2).to(torch.float8_e4m3fn).view(torch.uint8)
        scale = sc.view(torch.float8_e4m3fn).double()
        vals = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6], device=DEV, dtype=torch.float64)
        nib = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
        deq = vals[nib]
    else:
        sc = torch.randint(scale_lo, scale_hi, (n, ns), dtype=torch.uint8, device=DEV, generator=gen)
        scale = torch.exp2(sc.double() - 127)
        deq = codes.view(torch.float8_e4m3fn).double()
    put(scale_base, sc)
    deq = (deq.unflatten(1, (ns, f.quant_tile)) * scale[..., None]).flatten(1)
    if f.rope is not None:
        rope = torch.randn((n, 64), device=DEV, generator=gen).bfloat16()
        put(data_base + f.rope.offset, rope.view(torch.uint8).view(n, 128))
        deq = torch.cat([deq, rope.double()], 1)
    view = mem.as_strided((pages, page_size, f.token_bytes), (stride, f.token_bytes, 1))
    return view, deq, lay

def run(plan, q, caches, sink, scale, causal=1):
    b, s, h, _ = q.shape
    out = torch.full((b, s, h, 512), float("nan"), dtype=torch.bfloat16, device=DEV)
    lse = torch.full((b, s, h), float("nan"), device=DEV)
    need = workspace.reserve(torch.device("cuda", 0), plan.partial_rows * PARTIAL_FLOATS, b * s * plan.spec.head_blocks(h) if plan.partial_rows else 0)
    scratch, counters = workspace.addresses(need)
    args = []
    for c in caches:
        args += [c[0], c[1], c[2], c[3].data_stride, c[3].scale_offset, c[3].scale_stride]
    if len(caches) == 1:
        args += [None] * 6
    fn = get_kernel(plan.spec)
    fn(q, *args, sink, out, lse, scratch, counters, scale, plan.num_splits, plan.merge_ctas, plan.max_ctas, causal, 0)
    return out, lse

def oracle(q, parts, sink, scale):
    # parts: list of (deq (n,512), indices (b,s,k), length (b,s))
    b, s, h, _ = q.shape
    ks, ok = [], []
    for deq, idx, length in parts:
        n = deq.shape[0]
        v = (idx >= 0) & (idx < n) & (torch.arange(idx.shape[-1], device=DEV) < length[..., None])
        ks.append(torch.where(v[..., None], deq[idx.clamp(0, n - 1).long()], 0.0)); ok.append(v)
    k, ok = torch.cat(ks, 2), torch.cat(ok, 2)
    S = torch.einsum("bshd,bskd->bshk", q.double(), k) * scale
    S = S.masked_fill(~ok[:, :, None], -float("inf"))
    lse = torch.logsumexp(S, -1)
    den = torch.logaddexp(lse, sink.double().expand_as(lse))
    P = torch.exp(S - den[..., None]).nan_to_num(0.0)
    out = torch.einsum("bshk,bskd->bshd", P, k[..., :512])
    out[lse == -float("inf")] = 0
    return out, lse

def check(name, b, s, h, topk, fmt="v4", extra=None, extra_topk=0, page=64, epage=64, ragged=False, num_splits=None, seed=0, lo=115, hi=124, nan=False):
    if DRY:
        SPECS.append(plan_decode(sparse=True, batch=b, s_q=s, h_q=h, max_keys=topk, num_sms=132, ragged=ragged, num_splits=num_splits, cache_format=fmt, extra_format=extra or "", extra_keys=extra_topk).spec)
        return
    g = torch.Generator(DEV).manual_seed(seed)
    scale = 512 ** -0.5
    q = torch.randn((b, s, h, 512), device=DEV, generator=g).bfloat16()
    sink = torch.randn((h,), device=DEV, generator=g)
    caches, parts = [], []
    for f, k, p in [(fmt, topk, page)] + ([(extra, extra_topk, epage)] if extra else []):
        view, deq, lay = make_cache(f, max(4, 2 * k // p), p, g, lo, hi)
        n = deq.shape[0]
        idx = torch.randint(-1, n + 1, (b, s, k), dtype=torch.int32, device=DEV, generator=g)
        length = torch.randint(0, k + 1, (b, s), dtype=torch.int32, device=DEV, generator=g) if ragged else torch.full((b, s), k, dtype=torch.int32, device=DEV)
        caches.append((view, idx, length, lay)); parts.append((deq, idx, length))
    plan = plan_decode(sparse=True, batch=b, s_q=s, h_q=h, max_keys=topk, num_sms=132, ragged=ragged, num_splits=num_splits, cache_format=fmt, extra_format=extra or "", extra_keys=extra_topk)
    out, lse = run(plan, q, caches, sink, scale)
    torch.cuda.synchronize()
    eo, el = oracle(q, parts, sink, scale)
    err = ((out.double() - eo).norm() / eo.norm()).item()
    fin = el.isfinite()
    lerr = (lse.double() - el)[fin].abs().max().item() if fin.any() else 0.0
    same = torch.equal(fin, lse.isfinite())
    good = err < 2.2e-3 and lerr < 3e-5 and same
    again = run(plan, q, caches, sink, scale)
    det = torch.equal(out, again[0]) and torch.equal(lse, again[1])
    print(f"{'ok ' if good and det else 'BAD'} {name}: err {err:.2e} lse {lerr:.1e} det {det} heads {plan.spec.heads} splits {plan.num_splits} lanes {plan.spec.merge_lanes} bal {plan.spec.balanced}", flush=True)
    return good

def bench(name, b, s, h, topk, fmt="v4", extra=None, extra_topk=0, page=64, ragged=False, **kw):
    if DRY:
        SPECS.append(plan_decode(sparse=True, batch=b, s_q=s, h_q=h, max_keys=topk, num_sms=132, ragged=ragged, cache_format=fmt, extra_format=extra or "", extra_keys=extra_topk, **kw).spec)
        return
    g = torch.Generator(DEV).manual_seed(0)
    scale = 512 ** -0.5
    sets = []
    for i in range(2):
        q = torch.randn((b, s, h, 512), device=DEV, generator=g).bfloat16()
        caches = []
        for f, k in [(fmt, topk)] + ([(extra, extra_topk)] if extra else []):
            pages = max(64, min(b * k // page * 2, 3000))
            view, _, lay = make_cache(f, pages, page, g)
            idx = torch.randint(0, pages * page, (b, s, k), dtype=torch.int32, device=DEV, generator=g)
            caches.append((view, idx, torch.full((b, s), k, dtype=torch.int32, device=DEV), lay))
        sets.append((q, caches))
    sink = torch.zeros((h,), device=DEV)
    plan = plan_decode(sparse=True, batch=b, s_q=s, h_q=h, max_keys=topk, num_sms=132, ragged=ragged, cache_format=fmt, extra_format=extra or "", extra_keys=extra_topk, **kw)
    for q, c in sets:
        run(plan, q, c, sink, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    n = 10
    with torch.cuda.graph(graph):
        for i in range(n):
            run(plan, *sets[i % 2], sink, scale)
    graph.replay(); torch.cuda.synchronize(); time.sleep(0.1)
    ts = []
    for _ in range(5):
        a, z = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); graph.replay(); z.record(); torch.cuda.synchronize()
        ts.append(a.elapsed_time(z) * 1e3 / n)
    print(f"time {name}: {sorted(ts)[2]:.1f} us heads {plan.spec.heads} splits {plan.num_splits} bal {plan.spec.balanced}", flush=True)

SPECS = []
DRY = False

def main(what):
    if "check" in what:
        check("one tile", 1, 1, 64, 64)
        for h in (64, 16, 8, 32, 128, 24):
            check(f"h{h}", 2, 1, h, 200)
            check(f"h{h} long", 3, 2, h, 1111, page=3)
        check("extra", 3, 1, 64, 128, extra="v4", extra_topk=513)
        check("extra small pages", 3, 2, 16, 128, extra="v4", extra_topk=1024, epage=2, ragged=True)
        check("ragged", 5, 1, 128, 700, ragged=True)
        check("splits", 2, 1, 64, 1500, num_splits=5)
        check("big scales", 2, 1, 64, 300, lo=110, hi=140)
        check("all scales", 2, 1, 16, 300, lo=60, hi=138)
        for h in (64, 16, 32):
            check(f"v4.1 h{h}", 2, 2, h, 300, fmt="v4.1")
        check("v4.1 extra", 4, 1, 64, 128, fmt="v4.1", extra="v4.1", extra_topk=640, ragged=True)
    if "bench" in what:
        bench("128x128x2 128+1024", 128, 2, 128, 128, extra="v4", extra_topk=1024)
        bench("128x128x2 128+512", 128, 2, 128, 128, extra="v4", extra_topk=512)
        bench("128x64x1 128+1024", 128, 1, 64, 128, extra="v4", extra_topk=1024)
        bench("64x128x1 128+1024", 64, 1, 128, 128, extra="v4", extra_topk=1024)
        bench("1x128 128+1024", 1, 1, 128, 128, extra="v4", extra_topk=1024)
        bench("8x128 128+1024", 8, 1, 128, 128, extra="v4", extra_topk=1024)
        bench("16x64 128+1024", 16, 1, 64, 128, extra="v4", extra_topk=1024)
        bench("128x16 128+1024", 128, 1, 16, 128, extra="v4", extra_topk=1024)
        bench("128x128x2 topk 2048", 128, 2, 128, 2048)
        bench("v4.1 128x128x2 128+1024", 128, 2, 128, 128, fmt="v4.1", extra="v4.1", extra_topk=1024)
        bench("128x128x2 v4.1 topk 2048", 128, 2, 128, 2048, fmt="v4.1")
        bench("64x16 window + 8192", 64, 1, 16, 128, extra="v4", extra_topk=8192)
        bench("v4.1+fp4 128x128x2 128+1024", 128, 2, 128, 128, fmt="v4.1", extra="v4.1_fp4", extra_topk=1024)
        bench("v4.1+fp4 128x64 128+1024", 128, 1, 64, 128, fmt="v4.1", extra="v4.1_fp4", extra_topk=1024)
        bench("v4.1+fp4 128x16 128+1024", 128, 1, 16, 128, fmt="v4.1", extra="v4.1_fp4", extra_topk=1024)
        bench("fp4 128x16 2048", 128, 1, 16, 2048, fmt="v4.1_fp4")
        bench("v4 32h x 128 128+1024", 128, 1, 32, 128, extra="v4", extra_topk=1024)


if __name__ == "__main__":
    DRY = True
    main(sys.argv[1:])
    from cute_kernels.runtime.compile import precompile
    t = time.time()
    print(len(precompile(SPECS, 15)), "compiled in", time.time() - t, flush=True)
    DRY = False
    main(sys.argv[1:])
