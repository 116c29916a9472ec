"""docs/benchmarks.md from the measured figures."""

from __future__ import annotations

from typing import Any

_WHAT = ("decode", "prefill")
_SCALES = (
    "Scales are stored in fp16 and widened once when the session starts: as much memory as stored float32 ones, and "
    "0.5 bits per weight less in the file. What is added beyond the table is the runtime's own copy, reordered for its "
    "kernels. While it is made the file's pages are there too, a piece at a time where the product is by pieces. A "
    "copy kept in the file fits one kind of processor alone."
)
_PAGES = (
    "tieq's lookups read the file: a first look at a row maps pages around it, up to 2 MB on this system, and they "
    "count in the peak. With every row looked up they are the whole table (148 MB in the 1B shape), clean and for the "
    "system to take back. The builder's table is copied at the start."
)
_PLACES = (
    "Rates of one file differ by some per cent from load to load, because of where its weights come to lie in memory; "
    "each load is of all the files, in an order that changes."
)
_REPACKING = (
    "llama.cpp reorders what it multiplies by, too, and keeps the file's own table for lookups. `--no-repack` "
    "(`use_extra_bufts` in its API) runs without the second copy (`python -m benchmarks.gguf_memory FILE`):"
)


def text(found: dict[str, Any]) -> str:
    """The page."""
    machine = found["machine"]
    resumed = " (with `--resume`: some steps are from a run before)" if found.get("resumed") else ""
    lines = [
        "# Speed and memory",
        "",
        (f"`make bench` wrote this page in {found['minutes']:.0f} minutes{resumed} on {machine['cores']} cores of "
            f"{machine['processor']}: ours and the peers' files alternately, each in a process of its own, two "
            "threads. Where tokens are decoded, all are loaded and take turns of 8 tokens. Figures are medians with "
            "quartiles over rounds (turns); a ratio is the median of the pairs' ratios with their quartiles, above 1 "
            "where tieq is faster. Peak is resident memory, mapped files included."),
        "",
        "Versions: " + ", ".join(f"{name} {value}" for name, value in found["versions"].items())
        + "; the builder in an environment with " + ", ".join(found["peers"]) + ".",
        "",
        "## ONNX, both in onnxruntime-genai",
        "",
        ("tieq `--bits 4` and `--recipe fast` beside the builder's `-p int4 -e cpu` (int4 table too). The first has a "
        "scale for 32 weights, as the builder's, and `fast` one for 64 of the body. The 1B model has the shape of "
        "Llama 3.2 1B and random weights. Decode: 104 tokens after a prompt of 32, the cache laid out for all 136; "
        "prefill: 512 tokens and the first new one. All of tieq's files are of `--effort quick`, which changes the "
        "codes and not the layout; for quality see [method.md](method.md). Where the quartiles of a ratio "
        "reach far to both sides of 1, the two are level and the third digit is chance."),
        "",
        "| model | what | tieq | builder | ratio | peak, tieq | peak, builder | peak ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    labels = {
        "smollm2": "SmolLM2-135M, 4 bits", "smollm2 fast": "SmolLM2-135M, fast",
        "1b": "1B shape, 4 bits", "1b fast": "1B shape, fast",
    }  # fmt: skip
    lines += [_row(labels[name], what, found[f"onnx {what} {name}"]) for name in labels for what in _WHAT]
    gemma = found["onnx decode gemma"]["sides"][0]
    lines += [
        "",
        (
            f"Gemma 3 270M decodes at {gemma['median']:.1f} tokens/s ({gemma['low']:.1f} to {gemma['high']:.1f}) "
            "with a "
            f"peak of {gemma['peak'] / 1e6:.0f} MB; the builder on the same checkpoint: `{found['builder on gemma']}`."
        ),
        "",
        _PLACES,
        "",
        _PAGES,
        "",
        "## GGUF, both in llama.cpp",
        "",
        "tieq `--bits 4` beside llama.cpp's own Q4_0 of the same file, whose table is Q8_0.",
        "",
        "| model | what | tieq | llama.cpp Q4_0 | ratio | peak, tieq | peak, llama.cpp | peak ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        _row("SmolLM2-135M", "decode", found["gguf decode smollm2"]),
        _row("Gemma 3 270M", "decode", found["gguf decode gemma"]),
        "",
        "| file | bytes |",
        "| --- | --- |",
        *(f"| {name} | {size / 1e6:.2f} MB |" for name, size in found["bytes"].items()),
        "",
        "## One table in memory",
        "",
        (
            f"A 4-bit table of 128,256 x 2,048 ({found['table']['table_bytes'] / 1e6:.0f} MB with float32 scales) in a "
            "default session: resident memory that it adds after one step and at most, less what the same session adds "
            "with 64 rows, and the file (`python -m benchmarks.table_memory`)."
        ),
        "",
        "| layout | added | of the table | anonymous | peak | step | file |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in found["table"]["layouts"].items():
        lines.append(
            f"| {name} | {row['added'] / 1e6:.0f} MB | {row['of_table']:.2f} x | {row['anonymous'] / 1e6:.0f} MB "
            f"| {row['peak'] / 1e6:.0f} MB | {1000 * row['step']:.1f} ms | {row['file'] / 1e6:.0f} MB |"
        )
    lines += [
        "",
        _SCALES,
        "",
        _REPACKING,
        "",
        "| file | repacked | not repacked |",
        "| --- | --- | --- |",
        *(
            f"| {name} | "
            + " | ".join(f"{row[k]['rate']:.1f} tokens/s, {row[k]['peak'] / 1e6:.0f} MB" for k in ("with", "without"))
            + " |"
            for name, row in found["repacking"].items()
        ),
    ]
    lines += _exports(found)
    lines += ["", "## Where tieq loses", "", *(_losses(found) or ["In none of the comparisons above."])]
    return "\n".join(lines) + "\n"


def _losses(found: dict[str, Any]) -> list[str]:
    """The comparisons in which the peer is faster or smaller in memory."""
    lines = []
    for name, row in found.items():
        if isinstance(row, dict) and "ratio" in row:
            if row["ratio"] < 1:
                lines.append(f"- {name}: {row['ratio']:.2f} of the peer's speed.")
            if row["peak_ratio"] > 1:
                lines.append(f"- {name}: {row['peak_ratio']:.2f} of the peer's peak memory.")
    peer = found["llama.cpp 1b"]["convert"] + found["llama.cpp 1b"]["quantize"]
    ratio = found["streaming"]["llama-3.2-1b"]["seconds"] / peer
    if ratio > 1:
        lines.append(f"- export of the 1B shape, two containers: {ratio:.2f} of llama.cpp's time for one.")
    return lines


def _row(label: str, what: str, found: dict[str, Any]) -> str:
    unit = "tokens/s" if found["unit"] == "rate" else "s"
    digits = 1 if unit == "tokens/s" else 2
    cells = [
        f"{side['median']:.{digits}f} {unit} ({side['low']:.{digits}f} to {side['high']:.{digits}f})"
        for side in found["sides"]
    ]
    ratio = f"{found['ratio']:.2f} ({found['ratio_low']:.2f} to {found['ratio_high']:.2f})"
    peaks = [f"{side['peak'] / 1e6:.0f} MB" for side in found["sides"]]
    return "| " + " | ".join(
        [label, what, *cells, ratio, *peaks, f"{found['peak_ratio']:.2f}"]
    ) + " |"  # fmt: skip


def _exports(found: dict[str, Any]) -> list[str]:
    peer = found["llama.cpp 1b"]
    own = found["streaming"]["llama-3.2-1b"]
    total = peer["convert"] + peer["quantize"]
    lines = [
        "",
        "## Exports",
        "",
        "`tieq export --bits 4 --effort quick --no-evaluation` on random bf16 checkpoints: ONNX and GGUF, both proved.",
        "",
        "| checkpoint | parameters | seconds | seconds a billion | peak |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in found["streaming"].items():
        each = row["seconds"] / row["parameters"] * 1e9
        size, peak = f"{row['parameters'] / 1e6:,.0f} M", f"{row['peak'] / 1e9:.2f} GB"
        lines.append(f"| {name} | {size} | {row['seconds']:.1f} | {each:.0f} | {peak} |")
    return [
        *lines,
        "",
        (
            f"llama.cpp's converter and quantizer on the 1B checkpoint: {peer['convert']:.1f} s and "
            f"{peer['quantize']:.1f} "
            f"s ({total:.1f} s together, peak {peer['peak'] / 1e9:.2f} GB) for one GGUF file of "
            f"{peer['bytes'] / 1e6:.0f} "
            f"MB; tieq takes {own['seconds'] / total:.2f} times that for both containers."
        ),
        "",
        "| start-up | seconds | peak |",
        "| --- | --- | --- |",
        *(
            f"| `{name}` | {row['seconds']:.2f} | {row['peak'] / 1e6:.0f} MB |"
            for name, row in found["start-up"].items()
        ),
    ]
