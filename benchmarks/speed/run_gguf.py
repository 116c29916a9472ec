"""One GGUF file in llama.cpp in a process of its own: decode rate and peak memory on two threads. Prints one JSON line.

python run_gguf.py FILE
"""

from __future__ import annotations

import json
import resource
import sys
import time

import llama_cpp

PROMPT, WARM_UP, STEPS = 32, 8, 96


def main() -> None:
    model = llama_cpp.Llama(sys.argv[1], n_ctx=256, verbose=False, n_threads=2, n_threads_batch=2)
    model.eval([(37 * number) % 40_000 + 10 for number in range(PROMPT)])
    for number in range(WARM_UP):
        model.eval([100 + number])
    start = time.perf_counter()
    for number in range(STEPS):
        model.eval([200 + number])
    rate = STEPS / (time.perf_counter() - start)
    print(json.dumps({"rate": rate, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


if __name__ == "__main__":
    main()
