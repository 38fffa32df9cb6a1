"""Train a small gpt-oss of transformers on packed text: eager attention beside "cute".

    python scripts/train_gpt_oss.py                         loss curves of both, on a CPU or a GPU
    python scripts/train_gpt_oss.py --measure 4096 16384    time and memory of a training step on a GPU
    python scripts/train_gpt_oss.py --page FILE FILE        puts what such runs have written to --out into the page

The text is Python's documentation, as the standard library has it (`pydoc_data.topics`), a document for each topic and
a token for each byte. Sequences are packed without padding. Eager attention gets the mask of tokens x tokens that
transformers' gpt-oss does not make of packed positions; flex attention gets a block mask. docs/users/training.md has
the page.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Final, NamedTuple

import torch

from bench import svg
from bench.report import markdown

ROOT: Final = Path(__file__).resolve().parents[1]

VOCABULARY: Final = 256
TOGETHER: Final = 20
"""Number of first steps in which rounding has not yet changed which experts tokens go to."""
SMALL: Final = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
LIKE_20B: Final = {
    "hidden_size": 2880, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 64,
    "num_key_value_heads": 8, "num_local_experts": 1, "num_experts_per_tok": 1,
}  # fmt: skip
"""Sizes of two layers with the attention of gpt-oss-20b, one with its window, and hardly any experts."""
LONGEST: Final = 4000


class Batch(NamedTuple):
    """Packed sequences: tokens and positions (1, tokens), labels likewise, borders (sequences + 1,)."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    cu_seqlens: torch.Tensor


def batches(tokens: int, device: str) -> Iterator[Batch]:
    """Yields batches of `tokens` tokens, without end; topics come in random order, and long ones in parts."""
    texts = [text.encode("ascii", "ignore") for text in topics.values()]
    parts = [text[i : i + LONGEST] for text in texts for i in range(0, len(text), LONGEST)]
    gen = torch.Generator(device="cpu").manual_seed(0)
    while True:
        ids, lengths = bytearray(), []
        while len(ids) < tokens:
            part = parts[int(torch.randint(len(parts), (), generator=gen))][: tokens - len(ids)]
            ids += part
            lengths.append(len(part))
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        input_ids = torch.frombuffer(ids, dtype=torch.uint8).long()
        positions = torch.cat([torch.arange(n) for n in lengths])
        labels = torch.where(positions == 0, -100, input_ids)  # no token follows from another sequence
        yield Batch(*(t.to(device) for t in (input_ids[None], positions[None], labels[None], cu_seqlens)))


def model_of(sizes: dict[str, int], attention: str, device: str) -> Any:
    """Makes a gpt-oss with random weights."""
    from transformers import GptOssConfig, GptOssForCausalLM

    import cute_kernels.integrations.transformers  # noqa: F401  registers "cute"

    config = GptOssConfig(**sizes, head_dim=64, sliding_window=128, vocab_size=VOCABULARY, pad_token_id=None)
    config._attn_implementation = attention
    torch.manual_seed(0)
    return GptOssForCausalLM(config).to(device).train()


def masks_of(attention: str, batch: Batch, window: int) -> dict[str, Any]:
    """Returns the arguments with which a model's attention keeps sequences apart."""
    if attention == "cute":
        return {"cu_seq_lens_q": batch.cu_seqlens, "cu_seq_lens_k": batch.cu_seqlens}
    tokens, device = batch.input_ids.shape[1], batch.input_ids.device
    place = torch.arange(tokens, device=device)
    document = torch.bucketize(place, batch.cu_seqlens[1:-1], right=True)

    def sees(q: torch.Tensor, k: torch.Tensor, reach: int) -> torch.Tensor:
        return (document[q] == document[k]) & (k <= q) & (k > q - reach)

    made: dict[str, Any] = {}
    for kind, reach in (("full_attention", tokens), ("sliding_attention", window)):
        if attention == "flex_attention":
            from torch.nn.attention.flex_attention import create_block_mask

            made[kind] = create_block_mask(
                functools.partial(_of_heads, sees=sees, reach=reach), 1, None, tokens, tokens, device=device
            )
        else:
            seen = sees(place[:, None], place[None, :], reach)
            made[kind] = torch.zeros_like(seen, dtype=torch.bfloat16).masked_fill_(~seen, float("-inf"))[None, None]
    return {"attention_mask": made}


def _of_heads(
    b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *, sees: Callable[..., Any], reach: int
) -> Any:
    return sees(q, k, reach)


def loss_of(model: Any, batch: Batch, masks: dict[str, Any]) -> torch.Tensor:
    """Returns the mean loss of a batch, under autocast."""
    with torch.autocast(batch.input_ids.device.type, dtype=torch.bfloat16):
        return model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, labels=batch.labels, use_cache=False, **masks
        ).loss


def train(attention: str, steps: int, tokens: int, device: str) -> list[float]:
    """Trains and returns the loss of every step. Weights and batches are the same for each attention."""
    model, source = model_of(SMALL, attention, device), batches(tokens, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        batch = next(source)
        loss = loss_of(model, batch, masks_of(attention, batch, model.config.sliding_window))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def attention_step(model: Any, batch: Batch, masks: dict[str, Any]) -> Callable[[], None]:
    """Returns a forward and backward of only the attention modules, each over the output of the previous one."""
    inner, kinds = model.model, model.config.layer_types
    shape = (*batch.input_ids.shape, model.config.hidden_size)
    hidden = torch.randn(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    options = {"position_embeddings": inner.rotary_emb(hidden, batch.position_ids), "position_ids": batch.position_ids}
    made = masks.get("attention_mask", dict.fromkeys(kinds))
    others = {name: value for name, value in masks.items() if name != "attention_mask"}

    def step() -> None:
        model.zero_grad()
        out = hidden
        for layer, kind in zip(inner.layers, kinds, strict=True):
            out = layer.self_attn(hidden_states=out, attention_mask=made[kind], **options, **others)[0]
        out.backward(hidden.detach())

    return step


def milliseconds(step: Callable[[], None], repeats: int = 5) -> float:
    """Returns the milliseconds of a step on a GPU, after two that are not timed."""
    for repeat in range(2 + repeats):
        if repeat == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
        step()
    torch.cuda.synchronize()
    return round((time.perf_counter() - start) / repeats * 1000, 2)


def measure(attention: str, tokens: int) -> dict[str, Any]:
    """Measures forward and backward of two layers of gpt-oss-20b's sizes on a GPU: ms and GiB, and ms of attention."""
    case: dict[str, Any] = {"attention": attention, "tokens": tokens}
    torch.cuda.empty_cache()
    try:
        model, batch = model_of(LIKE_20B, attention, "cuda").bfloat16(), next(batches(tokens, "cuda"))
        masks = masks_of(attention, batch, model.config.sliding_window)

        def step() -> None:
            model.zero_grad()
            loss_of(model, batch, masks).backward()

        case["attention_ms"] = milliseconds(attention_step(model, batch, masks))
        case["ms"] = milliseconds(step)
        case["GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        case["sequences"] = len(batch.cu_seqlens) - 1
    except torch.OutOfMemoryError:
        case["failed"] = "out of memory"
    return case


def curves(found: dict[str, Any], plt: Any) -> Any:
    """Draws the loss of every step, and how far the two attentions are apart."""
    figure, (axis, below) = plt.subplots(2, 1, figsize=(7, 4.6), height_ratios=[3, 1], sharex=True)
    for (attention, losses), color, width in zip(found["losses"].items(), ("#cbd5e0", "#2b6cb0"), (4, 1), strict=True):
        axis.plot(losses, label=attention, color=color, linewidth=width)
    one, other = found["losses"].values()
    below.plot([a - b for a, b in zip(one, other, strict=True)], color="#4a5568", linewidth=0.8)
    axis.set_ylabel("loss, nats a byte")
    below.set_ylabel("difference")
    below.set_xlabel(f"step of {found['tokens']} packed tokens")
    for part in (axis, below):
        part.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    return figure


def in_words(found: dict[str, Any]) -> str:
    """Returns text about how close the losses of two attentions are, with the plot."""
    (one, losses), (other, others) = found["losses"].items()
    apart = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    last = [sum(values[-10:]) / len(values[-10:]) for values in (losses, others)]
    return (
        f"![loss of every step with {one} attention and with {other}](../img/training_loss.svg)\n\n"
        f"On {found['card']} the mean loss of the last 10 of {len(losses)} steps is {last[0]:.4f} with {one} attention"
        f" and {last[1]:.4f} with {other}. The losses of the first {TOGETHER} steps differ by at most"
        f" {max(apart[:TOGETHER]):.1e}; later ones by {sum(apart) / len(apart):.1e} on average, because a token near"
        " the border of two experts may go to the other one, and the runs then have different weights."
    )


def table(found: list[dict[str, Any]]) -> str:
    """Makes a table of time and memory of steps, a row for each number of tokens."""
    cases = {(case["tokens"], case["attention"]): case for one in found for case in one["cases"]}
    names = list(dict.fromkeys(name for _, name in cases))
    columns = ("attention, ms", "step, ms", "GiB")
    rows = []
    for tokens in sorted({tokens for tokens, _ in cases}):
        own = [cases.get((tokens, name), {"failed": "-"}) for name in names]
        cells = (str(case.get(key, case.get("failed"))) for case in own for key in ("attention_ms", "ms", "GiB"))
        rows.append([str(tokens), *cells])
    header = [f"{found[0]['card']}: packed tokens", *(f"{name}: {column}" for name in names for column in columns)]
    return "\n".join(markdown.table(header, rows))


def fill_page(files: list[Path]) -> None:
    """Writes the plot and docs/users/training.md from results of earlier runs."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    path = ROOT / "docs" / "users" / "training.md"
    page = path.read_text(encoding="utf-8")
    for found in results:
        if "losses" in found:
            page = markdown.fill(page, "training:curves", in_words(found))
            svg.write({"training_loss.svg": functools.partial(curves, found)}, ROOT / "docs" / "img")
    measured = [found for found in results if "cases" in found]
    if measured:
        page = markdown.fill(page, "training:steps", table(measured))
    path.write_text(page, encoding="utf-8")


def main() -> None:
    """Trains, measures or fills the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps (200)")
    parser.add_argument("--tokens", type=int, default=4096, help="packed tokens of a step (4096)")
    parser.add_argument("--measure", type=int, nargs="+", metavar="TOKENS", help="measure steps of so many tokens")
    parser.add_argument("--attentions", nargs="+", default=["eager", "cute"], help="of transformers (eager cute)")
    parser.add_argument("--out", type=Path, default=Path("build/train_gpt_oss.json"), help="where results go")
    parser.add_argument("--page", type=Path, nargs="+", metavar="FILE", help="fill the page from results, and stop")
    options = parser.parse_args()
    if options.page:
        fill_page(options.page)
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.measure:
        found: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "cases": []}
        for tokens in options.measure:
            for attention in options.attentions:
                found["cases"].append(measure(attention, tokens))
                print(found["cases"][-1], flush=True)
                options.out.write_text(json.dumps(found) + "\n")  # the next case may end the process
    else:
        card = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
        found = {"card": card, "tokens": options.tokens, "losses": {}}
        for attention in options.attentions:
            losses = train(attention, options.steps, options.tokens, device)
            found["losses"][attention] = losses
            last = losses[-min(10, len(losses)) :]
            print(f"{attention}: loss {losses[0]:.4f} at first, {sum(last) / len(last):.4f} at last", flush=True)
    options.out.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
