"""Tables and the plot of vLLM, from the results of scripts/vllm_check.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench.records import card_slug
from bench.report.markdown import MISSING, paragraphs, plain, scientific, short, table

Found = Mapping[str, Any]
PAIRS = (
    ("int8_per_token_head", "cute-int8", "triton-int8", "Triton"),
    ("bf16", "cute-bf16", "flash-bf16", "FlashAttention 3"),
    ("fp8", "cute-fp8", "flash-fp8", "FlashAttention 3"),
    ("fp8", "cute-fp8", "triton-fp8", "Triton"),
)
"""Cache, our backend, the other backend over the same cache, and its name."""
LONG = 8192  # tokens from which ours must be faster
INT8_TIMES = 2.0  # factor by which ours must be faster over INT8


class Row(NamedTuple):
    """A case of both backends, or of one: its number of requests, and their tokens in the cache or to come."""

    cache: str
    other: str
    batch: int
    context: int
    ours: Mapping[str, Any]
    theirs: Mapping[str, Any]

    def times(self, key: str) -> float | None:
        """Returns their time over ours."""
        ours, theirs = self.ours.get(key), self.theirs.get(key)
        return theirs / ours if ours and theirs else None


def rows(found: Found, part: str = "speed", fields: tuple[str, str] = ("batch", "context")) -> list[Row]:
    """Returns all cases of a part, by cache and by the two numbers that `fields` names."""
    backends = found.get(part, {}).get("backends", {})

    def cases(name: str) -> dict[tuple[int, int], Mapping[str, Any]]:
        return {(case[fields[0]], case[fields[1]]): case for case in backends.get(name, {}).get("cases", ())}

    made = []
    for cache, ours, theirs, other in PAIRS:
        mine, peer = cases(ours), cases(theirs)
        if peer:
            made += [Row(cache, other, *key, mine.get(key, {}), peer.get(key, {})) for key in sorted({*mine, *peer})]
    return made


def times(value: float | None) -> str:
    """Formats a ratio: "1.83 x"."""
    return MISSING if value is None else f"{value:.2f} x"


def speed(found: Found) -> list[str]:
    """Returns milliseconds per token, and the share of attention kernels."""
    made = rows(found)
    if not made:
        return []
    header = (
        "cache, other backend", "batch x context", "a token, ms", "other's", "faster", "attention, ms", "other's",
        "faster",
    )  # fmt: skip
    lines = table(
        header,
        [
            [
                f"{row.cache}, {row.other}", f"{row.batch} x {row.context}",
                short(row.ours.get("ms")), short(row.theirs.get("ms")), times(row.times("ms")),
                short(row.ours.get("attention_ms")), short(row.theirs.get("attention_ms")),
                times(row.times("attention_ms")),
            ]
            for row in made
        ],
    )  # fmt: skip
    return [f"{found['speed']['layers']} layers of Llama 3 8B's shapes:", "", *lines, "", *verdict(made)]


def speeds(all_found: Sequence[Found]) -> list[str]:
    """Makes one table for the page: the runs with the most layers over their longest context, cards side by side."""
    layers = max((found["speed"]["layers"] for found in all_found if "speed" in found), default=0)
    header, lines = ["cache, other backend, batch x context"], dict[str, list[str]]()
    for found in all_found:
        if found.get("speed", {}).get("layers") == layers:
            card = card_slug(found["card"]).upper()
            header += [f"{card}: a token, ms", "faster", "attention alone"]
            made = rows(found)
            longest = max((row.context for row in made), default=0)
            for row in (row for row in made if row.context == longest):
                label = f"{row.cache}, {row.other}, {row.batch} x {row.context}"
                cells = [short(row.ours.get("ms")), times(row.times("ms")), times(row.times("attention_ms"))]
                lines.setdefault(label, []).extend(cells)
    return table(header, ([label, *cells] for label, cells in lines.items())) if lines else []


def verdict(made: list[Row]) -> list[str]:
    """Returns how many of the long cases reach their goal."""
    long = [row for row in made if row.context >= LONG and row.times("ms") is not None]
    if not long:
        return []
    faster = sum((row.times("ms") or 0) > 1 for row in long)
    said = f"From {LONG} tokens of context on, a token takes less time than on the other backend in {faster} of"
    said += f" {len(long)} cases"
    int8 = [row for row in long if row.cache.startswith("int8")]
    if int8:
        twice = sum((row.times("ms") or 0) >= INT8_TIMES for row in int8)
        said += f"; over INT8, at most 1/{INT8_TIMES:.0f} of it in {twice} of {len(int8)}"
    return [f"{said}."]


def tokens(found: Found) -> list[str]:
    """Returns which engines produced transformers' tokens."""
    engines = found.get("tokens", {}).get("engines", {})
    served = [(name, engine) for name, engine in engines.items() if engine.get("wrong_requests")]
    if not served:
        return []
    lines = []
    for name, engine in served:
        model, _, rest = name.partition("-")
        cache, _, how = rest.rpartition("-")
        wrong = ", ".join(map(str, engine["wrong_requests"]))
        lines.append([f"{model}, {cache}", how, plain(engine.get("runner")), wrong])
    header = ("model, cache", "decoding", "vLLM's runner", "wrong of 1, 32 and 8 requests")
    return table(header, lines)


COUNTS = ("tokens", "differ", "otherwise", "wrong")


def mla(all_found: Sequence[Found]) -> list[str]:
    """Returns the user page's table of sparse MLA: a row for each vLLM, model and engine that ours is compared with."""
    sums: dict[tuple[str, str, str], dict[str, int]] = {}
    for found in all_found:
        for model, said in found.get("mla-tokens", {}).get("models", {}).items():
            for case in said["cases"]:
                other = case["b"].split("-")[0]
                if case["a"].startswith("ours") and other != "ours":
                    version = ".".join(found["versions"]["vllm"].split(".")[:2])
                    row = sums.setdefault((version, model, other), dict.fromkeys(COUNTS, 0))
                    for name in COUNTS:
                        row[name] += case.get(name, 0)
    header = ("vLLM", "model", "compared with", "tokens", "others", "of other keys", "wrong")
    return table(header, [[*key, *map(plain, row.values())] for key, row in sums.items()]) if sums else []


def mla_tokens(found: Found) -> list[str]:
    """Returns runs of two engines that were led along the same tokens, over all rounds."""
    lines = []
    for model, said in found.get("mla-tokens", {}).get("models", {}).items():
        for a, b in dict.fromkeys((case["a"], case["b"]) for case in said["cases"] if case["a"] != case["b"]):
            cases = [case for case in said["cases"] if (case["a"], case["b"]) == (a, b)]
            sums = (plain(sum(case.get(key, 0) for case in cases)) for key in COUNTS)
            most = (short(max(case[key] for case in cases)) for key in ("gap", "scores"))
            lines.append([model, f"{a}, {b}", *sums, *most, short(said["near"])])
    header = (
        "model", "runs", "tokens", "others", "of other keys", "wrong", "their scores apart", "any scores apart",
        "a near tie",
    )  # fmt: skip
    return [*table(header, lines), "", mla_started(found)] if lines else []


def mla_started(found: Found) -> str:
    """Returns in words how fast engines started, and the effect of prefix caching and drafts."""
    engines = found.get("mla-tokens", {}).get("engines", {}).values()
    starts = sorted(engine["start_s"] for engine in engines if "start_s" in engine)
    if not starts:
        return ""
    cached = sum(engine.get("cached", {}).get("again", 0) for engine in engines)
    said = (
        f"Engines started in {short(starts[0])} to {short(starts[-1])} s. {plain(cached)} tokens came from the cache."
    )
    if drafts := [engine for engine in engines if engine.get("draft")]:
        accepted, drafted = (plain(int(sum(engine[name] for engine in drafts))) for name in ("accepted", "draft"))
        said += f" {accepted} of {drafted} drafts were taken."
    return " ".join((said, *(shadow(engine["shadow"]) for engine in engines if "shadow" in engine)))


def shadow(found: Mapping[str, Any]) -> str:
    """Returns in words how two kernels answered the same calls; see bench/vllm_shadow.py."""
    if "apart" in found:
        return f"In {plain(found['calls'])} calls rows of FlashMLA's output are at most {short(found['apart'])} away."
    rows, others = plain(found["rows"]), found["rows_with_others"]
    lacks = (
        f"; in {plain(others)} of them DeepGEMM's scores prefer another key" if others else ", none of which lacks a"
    )
    how = f", by at most {short(found['furthest_below'])}" if others else " key that DeepGEMM's scores prefer"
    said = f"Our indexer chose {rows} rows of keys{lacks}{how}."
    if found.get("rows_with_ties"):
        said += (
            f" {plain(found['rows_with_ties'])} of them end among keys of one score, of which vLLM's top-k may choose"
            f" others, and it lacked a key in {plain(found['theirs_with_others'])}."
        )
    return said


SHARES = ("attention", "indexer", "top-k", "slots", "rest")


def mla_steps(found: Found) -> list[str]:
    """Returns milliseconds per token of sparse MLA, with the plugin and without it, and the shares of kernels."""
    lines, ratios = [], []
    for heads, ours, theirs in step_pairs(found):
        mine, peer = ours.get("shares_ms", {}), theirs.get("shares_ms", {})
        ratio = peer["attention"] / mine["attention"] if mine.get("attention") and peer else None
        ratios += [ratio] if ratio else []
        lines.append(
            [f"{heads}, {ours['family']}", f"{ours['batch']} x {ours['context']}",
             f"{short(ours['ms'])}, {short(theirs['ms'])}",
             f"{short(ours.get('gpu_ms'))}, {short(theirs.get('gpu_ms'))}", short(mine.get("attention")),
             short(peer.get("attention")), times(ratio), *(short(mine.get(name)) for name in SHARES[1:])]
        )  # fmt: skip
    header = (
        "heads, values", "batch x context", "a token with the plugin, without it, ms", "its kernels", "attention, ms",
        "FlashMLA", "faster", *SHARES[1:],
    )  # fmt: skip
    if not ratios:
        return []
    said = f"FlashMLA's attention takes {min(ratios):.2f} to {max(ratios):.2f} times as long as ours"
    return [*table(header, lines), "", f"{said}, in {len(ratios)} cases."]


def step_pairs(found: Found) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """Returns heads, our case, and vLLM's own, for everything that was timed in both."""
    backends, pairs = found.get("mla-steps", {}).get("backends", {}), []
    for name in backends:
        who, _, heads = name.partition("-")
        if who == "ours":
            mine, peer = (
                {
                    (case["family"], case["context"], case["batch"]): case
                    for case in backends.get(n, {}).get("cases", ())
                }
                for n in (name, f"stock-{heads}")
            )
            pairs += [(heads, mine[key], peer[key]) for key in mine if key in peer]
    return pairs


def run(found: Found) -> str:
    """Returns card, day and versions."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return f"{found['card']}, {found['date']}, {versions}:"


def sparse(found: Found) -> list[str]:
    """Returns sparse MLA by vLLM's forward."""
    lines = []
    for case in found.get("sparse", {}).get("cases", []):
        ours, theirs = _us(case, "ours"), _us(case, "flashmla")
        faster = times(theirs / ours if ours and theirs else None)
        figures = [short(ours), short(theirs), faster, scientific(case.get("difference"))]
        lines.append([str(case["heads"]), str(case["requests"]), *figures])
    return table(("heads", "requests", "ours, us", "FlashMLA, us", "faster", "difference"), lines) if lines else []


def _us(case: Mapping[str, Any], name: str) -> float | None:
    """Returns microseconds; None if there are none, or if words say why."""
    us = case.get(f"{name}_us")
    return us if isinstance(us, float) else None


def first(found: Found) -> list[str]:
    """Returns milliseconds to the first token."""
    made = [row for row in rows(found, "first", ("requests", "tokens")) if row.times("ms")]
    if not made:
        return []
    header = ("cache, other backend", "requests x tokens", "first token, ms", "other's", "faster")
    lines = [
        [
            f"{row.cache}, {row.other}", f"{row.batch} x {row.context}", short(row.ours["ms"]),
            short(row.theirs["ms"]), times(row.times("ms")),
        ]
        for row in made
    ]  # fmt: skip
    return [f"{found['first']['layers']} layers of Llama 3 8B's shapes:", "", *table(header, lines)]


def prompts(found: Found) -> list[str]:
    """Returns attention of prompts: fresh ones, and those with tokens in the cache."""
    parts: tuple[tuple[str, dict[str, str], list[list[str]]], ...] = (
        ("requests x tokens", FRESH, []),
        ("requests x new tokens, in the cache", CONTINUED, []),
    )
    for case in found.get("prompts", {}).get("cases", []):
        _, columns, lines = parts[bool(case["context"])]
        size = f"{case['requests']} x {case['tokens']}" + (f", {case['context']}" if case["context"] else "")
        lines.append([size, *(short(_us(case, name)) for name in columns)])
    return paragraphs(*(table((size, *columns.values()), lines) for size, columns, lines in parts if lines))


FRESH = {
    "flash_fresh": "FlashAttention 3, us", "sink_attention": "`sink_attention`", "triton_bf16": "Triton, bf16",
    "triton_int8": "Triton, INT8",
}  # fmt: skip
CONTINUED = {
    "ours_auto": "ours, bf16, us", "triton_bf16": "Triton", "ours_fp8": "ours, FP8",
    "flash_fp8": "FlashAttention 3 with FP8 queries", "ours_int8_per_token_head": "ours, INT8", "triton_int8": "Triton",
}  # fmt: skip
"""Measurements, and the columns that show them."""


def wrong(found: Found) -> list[str]:
    """Returns in words what failed or was left out."""
    said = found.get("wrong", [])
    return [f"Failed or left out: {'; '.join(' '.join(line.split())[:160] for line in said)}."] if said else []


BLOCKS: dict[str, Callable[[Found], list[str]]] = {
    "Sparse MLA, tokens": mla_tokens,
    "Sparse MLA, a step": mla_steps,
    "Time per token": speed,
    "Time to the first token": first,
    "Tokens": tokens,
    "Sparse MLA, a layer": sparse,
    "Prompts, a layer": prompts,
}


def page(all_found: Sequence[Found]) -> list[str]:
    """Returns the text between the marks: one card after the other."""
    return paragraphs(*(block for found in all_found for block in _of_card(found)))


def _of_card(found: Found) -> Iterator[list[str]]:
    yield [run(found)]
    for title, block in BLOCKS.items():
        if lines := block(found):
            yield [f"**{title}**"]
            yield lines
    yield wrong(found)


COLOURS = {1: "#63b3ed", 16: "#2b6cb0", 64: "#c05621"}


def speed_plot(found: Found, plt: Any) -> Any:
    """Draws milliseconds per token over context, a panel for each pair, ours as lines and the other's dashed."""
    made = [row for row in rows(found) if row.ours.get("ms") and row.theirs.get("ms")]
    panels = list(dict.fromkeys((row.cache, row.other) for row in made))
    if not panels:
        return None
    figure, axes = plt.subplots(1, len(panels), figsize=(3.4 * len(panels), 3.8), sharey=True, squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        shown = [row for row in made if (row.cache, row.other) == panel]
        for batch in sorted({row.batch for row in shown}):
            line = [row for row in shown if row.batch == batch]
            contexts, colour = [row.context for row in line], COLOURS.get(batch, "#4a5568")
            axis.plot(contexts, [row.ours["ms"] for row in line], "o-", markersize=4, linewidth=1, color=colour,
                      label=f"batch {batch}")  # fmt: skip
            axis.plot(contexts, [row.theirs["ms"] for row in line], "s--", markersize=4, linewidth=1, color=colour)
        ticks = sorted({row.context for row in shown})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(ticks, [f"{context // 1024}k" if context >= 1024 else str(context) for context in ticks])
        axis.set_title(f"{panel[0]}\ndashed: {panel[1]}", fontsize=9)
        axis.set_xlabel("context", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("ms a token")
    axes[0][0].legend(frameon=False, fontsize=8)
    layers = found["speed"]["layers"]
    figure.suptitle(f"vLLM, {layers} layers of Llama 3 8B on {found['card']}, {found['date']}", fontsize=9)
    return figure


def steps_plot(found: Found, plt: Any) -> Any:
    """Draws milliseconds of a step's kernels by share, ours beside vLLM's own, a panel for each number of heads."""
    pairs = [pair for pair in step_pairs(found) if pair[1]["family"] == "normal"]
    pairs = [(heads, a, b) for heads, a, b in pairs if "shares_ms" in a and "shares_ms" in b]
    panels = sorted({heads for heads, *_ in pairs}, key=int)
    if not panels:
        return None
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.8), squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        shown = sorted((p for p in pairs if p[0] == panel), key=lambda p: (p[1]["context"], p[1]["batch"]))
        for shift, cases in ((-0.2, [ours for _, ours, _ in shown]), (0.2, [theirs for *_, theirs in shown])):
            places, bottom = [i + shift for i in range(len(shown))], [0.0] * len(shown)
            for name, colour in zip(SHARES, ("#2b6cb0", "#c05621", "#dd9a6b", "#4a5568", "#e2e8f0"), strict=True):
                parts = [case["shares_ms"][name] for case in cases]
                axis.bar(places, parts, 0.36, bottom=bottom, color=colour, label=name if shift < 0 else None)
                bottom = [a + b for a, b in zip(bottom, parts, strict=True)]
        labels = [f"{ours['batch']} x {ours['context'] // 1024}k" for _, ours, _ in shown]
        axis.set_xticks(range(len(shown)), labels, fontsize=7, rotation=45)
        axis.set_title(f"{panel} heads: ours, then FlashMLA", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("ms of kernels a step")
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"vLLM, {found['mla-steps']['layers']} layers of DeepSeek-V3.2 on {found['card']}", fontsize=9)
    return figure


PLOTS: dict[str, tuple[str, Callable[[Found, Any], Any]]] = {
    "vllm_speed.svg": ("speed", speed_plot),
    "vllm_mla_steps.svg": ("mla-steps", steps_plot),
}
"""Plots in docs/img: the part of a run that each shows, and the function that draws the first run with that part."""
