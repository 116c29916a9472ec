"""One GGUF file in llama.cpp in a process of its own: decode rate and peak memory on two threads. Prints JSON lines.

python run_gguf.py FILE

Decode is timed once for each line that comes in; the peak is told at the end.
"""

from __future__ import annotations

import json
import resource
import sys
import time

import llama_cpp

PROMPT, WARM_UP, STEPS = 32, 8, 8


def main() -> None:
    model = llama_cpp.Llama(sys.argv[1], n_ctx=512, verbose=False, n_threads=2, n_threads_batch=2)
    model.eval([(37 * number) % 40_000 + 10 for number in range(PROMPT)])
    for number in range(WARM_UP):
        model.eval([100 + number])
    tell(ready=1.0)
    for _ in sys.stdin:
        start = time.perf_counter()
        for number in range(STEPS):
            model.eval([200 + number])
        tell(rate=STEPS / (time.perf_counter() - start))
    tell(peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def tell(**found: float) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
