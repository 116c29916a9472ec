"""The worker's side of the protocol: requests are JSON lines on stdin, answers go to a descriptor of their own."""

import json
import os
import sys


def serve(handle):
    """Answer every request with ``handle(document) -> (header, bytes)`` until stdin ends."""
    answers = int(os.environ["TIEQ_ANSWERS"])
    for line in sys.stdin:
        try:
            header, payload = handle(json.loads(line))
        except Exception as error:
            header, payload = {"error": " ".join(str(error).split())[:500]}, b""
        content = json.dumps({**header, "bytes": len(payload)}).encode() + b"\n" + payload
        view = memoryview(content)
        while view:
            view = view[os.write(answers, view) :]
