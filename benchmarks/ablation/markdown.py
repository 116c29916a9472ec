"""The results of `benchmarks.ablation` as a Markdown table: `python -m benchmarks.ablation.markdown results.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def table(document: dict[str, Any]) -> str:
    """One row a variant: bits, KL by role for each text, top-1 for both roles, seconds, peak memory over the table."""
    texts = [name for name, value in document["rows"][0].items() if isinstance(value, dict)]
    heads = ["variant", "bits/weight", *(f"{name}: lookup / logits / both" for name in texts), "top-1", "seconds",
             "memory"]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    for row in document["rows"]:
        kls = [" / ".join(f"{row[name][role]['kl']['value']:.4f}" for role in ("lookup", "logits", "both"))
               for name in texts]  # fmt: skip
        kls = [f"{kl} ± {row[name]['both']['kl']['standard_error']:.4f}" for kl, name in zip(kls, texts, strict=True)]
        top = f"{row[texts[0]]['both']['top1']['value']:.3f}"
        cells = [row["variant"], f"{row['bits']:.2f}", *kls, top, f"{row['seconds']:.0f}",
                 f"{row['peak_over_table']:.1f} x"]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
