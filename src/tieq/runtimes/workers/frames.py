"""The worker's side of the protocol: requests are JSON lines on stdin, answers go to a descriptor of their own."""

import json
import os
import queue
import sys
import threading


def serve(handle):
    """Answer every request with ``handle(document) -> (header, bytes)``; end when stdin does, at once."""
    answers = int(os.environ["TIEQ_ANSWERS"])
    requests = queue.Queue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while True:
        line = requests.get()
        try:
            header, payload = handle(json.loads(line))
        except Exception as error:
            header, payload = {"error": " ".join(str(error).split())[:500]}, b""
        content = json.dumps({**header, "bytes": len(payload)}).encode() + b"\n" + payload
        view = memoryview(content)
        while view:
            view = view[os.write(answers, view) :]


def _read(requests):
    for line in sys.stdin:
        requests.put(line)
    # Whoever asked is gone, and nobody wants the answer that is being computed.
    os._exit(0)
