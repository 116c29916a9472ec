"""One onnxruntime-genai folder in a process of its own: decode rate, prefill time, peak memory. Prints JSON lines.

python run_genai.py FOLDER decode|prefill

Decode is timed once for each line that comes in; the peak is told at the end.
"""

from __future__ import annotations

import json
import resource
import sys
import time

import onnxruntime_genai as genai

PROMPT, WARM_UP, STEPS, PREFILL = 32, 8, 8, 512
# What each of the two writes at most (twelve turns): the cache is laid out for as many tokens at once.
ROOM = {"decode": 136, "prefill": 513}
# The default is one thread on a machine whose two cores look like one.
THREADS = {"model": {"decoder": {"session_options": {"intra_op_num_threads": 2}}}}


def main() -> None:
    folder, what = sys.argv[1:]
    config = genai.Config(folder)
    config.overlay(json.dumps(THREADS))
    model = genai.Model(config)
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=ROOM[what], min_length=ROOM[what], do_sample=False)
    generator = genai.Generator(model, settings)
    ids = [(37 * number) % 40_000 + 10 for number in range(PREFILL)]
    if what == "prefill":
        start = time.perf_counter()
        generator.append_tokens(ids)
        generator.generate_next_token()
        tell(seconds=time.perf_counter() - start)
    else:
        generator.append_tokens(ids[:PROMPT])
        for _ in range(WARM_UP):
            generator.generate_next_token()
        tell(ready=1.0)
        for _ in sys.stdin:
            start = time.perf_counter()
            for _ in range(STEPS):
                generator.generate_next_token()
            tell(rate=STEPS / (time.perf_counter() - start))
    tell(peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def tell(**found: float) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
