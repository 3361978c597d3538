"""The tables of memory_table.py: its rows, and beside them what articles claim."""

import collections
import math
import statistics

BIG, CALL, CALLS = "the big batch", "4 micro-batches in one call", "4 micro-batches in four calls"
CLAIMS = """\
| | articles | ours | why they differ |
|---|---|---|---|
| ResNet-50, batch 256 | 10.8 GB | {big:.3g} GB | theirs is a card's, ours is compiled for a CPU: \
the convolutions' results alone are 11.4 GB in float32, and it keeps three such (the result, \
that less its mean, the next one's input) |
| in 4 x 64 | 3.1 GB | {parts:.3g} GB | the same |
| the one of the other | 3.5 x | {less:.1f} x | activations are a fourth; all else stays |
| both with `jax.checkpoint` | | {big_checkpoint:.3g} and {parts_checkpoint:.3g} GB | each block's \
input is kept, and one block; that it meets the first two rows is chance |
| an epoch in 4 x 64 | 3.2 to 3.5 h, +9 % | {call:+.0%} in one call, {calls:+.0%} in four | ours: \
an update with GroupNorm, on a CPU, of fewer and smaller images |
| accuracy | 76.2 against 75.9 % | not measured | ImageNet takes a card; CIFAR-10 is above |
| accumulation is slower by | 10 to 15 %; almost 4 x | {call:+.0%}, {calls:+.0%} | almost 4 x \
would be a window against one micro-batch, a fourth of the examples |
| time with `jax.checkpoint` | +30 % | {checkpoint:+.0%} | one more forward pass, of three passes' \
work |
| memory with 16 bits | half | {to_16:.2f} x; BERT-base {bert_to_16:.2f} x | a CPU convolves in \
float32 and keeps that too; parameters and optimizer stay float32 |
| BERT-base, batch 8 | 11 GB | {bert:.3g} GB; with checkpoint {bert_checkpoint:.3g} GB | ours: 512 \
tokens, without dropout's masks |
| batch 32 on 11 GB | | {plan} | `plan_microbatches`, which casts and recomputes by itself |
| model parallel, 8 devices | | batch 32: {devices:.3g} GB each; 4 x 8: {devices_parts:.3g} GB | \
BERT-base, all sharded; parameters are gathered where they are used |
"""


def of_steps(rows):
    """The rows of compiled steps, by cell."""
    return {row["cell"]: row for row in rows if "params" in row}


def ratios(row):
    """Time and peak of each arm against the big batch; the median of the ratios within a run."""

    def time_of(arm):
        return statistics.median(
            ms / big for ms, big in zip(row["ms"][arm], row["ms"][BIG], strict=True)
        )

    return {arm: (time_of(arm), row["peak"][arm] / row["peak"][BIG]) for arm in row["ms"]}


def claims_table(rows):
    """The articles' figures and ours; nan is still to be measured."""

    def missing(found):
        return collections.defaultdict(lambda: math.nan, found)

    peak = missing({name: row["peak"] / 1e9 for name, row in of_steps(rows).items()})
    of_arms = {a: time - 1 for row in rows if "ms" in row for a, (time, _) in ratios(row).items()}
    slower = missing(of_arms)
    resnet, bert = "resnet50-batch/{}/{}/{}".format, "bert-base/{}/{}/{}".format
    big, parts = (peak[resnet("float32", "plain", split)] for split in ("1x256", "4x64"))
    whole_bert = peak[bert("float32", "plain", "1x8")]
    return CLAIMS.format(
        big=big,
        parts=parts,
        less=big / parts,
        big_checkpoint=peak[resnet("float32", "checkpoint", "1x256")],
        parts_checkpoint=peak[resnet("float32", "checkpoint", "4x64")],
        to_16=peak[resnet("bfloat16", "plain", "1x256")] / big,
        bert=whole_bert,
        bert_checkpoint=peak[bert("float32", "checkpoint", "1x8")],
        bert_to_16=peak[bert("bfloat16", "plain", "1x8")] / whole_bert,
        devices=peak[bert("float32", "plain", "1x32/8 devices")],
        devices_parts=peak[bert("float32", "plain", "4x8/8 devices")],
        plan=next((row["advice"] for row in rows if "advice" in row), math.nan),
        call=slower[CALL],
        calls=slower[CALLS],
        checkpoint=slower["checkpoint"],
    )


def memory_table(rows):
    """The rows of compiled steps, and the plans."""
    lines = ["| step, GB | params, optimizer | batch | accumulator | all else | peak |"]
    lines.append("|---|---|---|---|---|---|")
    for name, row in of_steps(rows).items():
        kept = row["params"] + row["opt_state"] + row["statistics"]
        sizes = kept, row["batch"], row["accumulator"], row["temporaries"], row["peak"]
        lines.append(f"| {name} | {' | '.join(f'{size / 1e9:.2f}' for size in sizes)} |")
    plans = [f"{row['cell']}:\n\n{row['table']}" for row in rows if "table" in row]
    return "\n\n".join(["\n".join(lines), *plans])


def time_table(rows):
    """The arms of the time part."""
    lines = ["| an update of ResNet-50, GroupNorm | ms | time | peak |", "|---|---|---|---|"]
    for row in (row for row in rows if "ms" in row):
        images = "{batch} x {pixels} x {pixels}".format(**row["config"])
        for arm, (slower, larger) in ratios(row).items():
            ms = statistics.median(row["ms"][arm])
            lines.append(f"| {images}, {arm} | {ms:.0f} | {slower:.2f} x | {larger:.2f} x |")
    return "\n".join(lines)
