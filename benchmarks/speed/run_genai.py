"""One onnxruntime-genai folder in a process of its own: decode rate, prefill time, peak memory. Prints one JSON line.

python run_genai.py FOLDER decode|prefill
"""

from __future__ import annotations

import json
import resource
import sys
import time

import onnxruntime_genai as genai

PROMPT, WARM_UP, STEPS, PREFILL = 32, 8, 96, 512


def main() -> None:
    folder, what = sys.argv[1:]
    model = genai.Model(folder)
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=700, min_length=700, do_sample=False)
    generator = genai.Generator(model, settings)
    ids = [(37 * number) % 40_000 + 10 for number in range(PREFILL)]
    if what == "prefill":
        start = time.perf_counter()
        generator.append_tokens(ids)
        generator.generate_next_token()
        found = {"seconds": time.perf_counter() - start}
    else:
        generator.append_tokens(ids[:PROMPT])
        for _ in range(WARM_UP):
            generator.generate_next_token()
        start = time.perf_counter()
        for _ in range(STEPS):
            generator.generate_next_token()
        found = {"rate": STEPS / (time.perf_counter() - start)}
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(found))


if __name__ == "__main__":
    main()
