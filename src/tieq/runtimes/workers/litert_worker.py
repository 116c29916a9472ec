"""LiteRT in a Python of its own: no package of tieq's is at hand here."""

import numpy as np
from ai_edge_litert.interpreter import Interpreter
from frames import serve

state = {"length": 0}


def handle(document):
    """Load a model, or give the logits of one sequence."""
    if "model" in document:
        interpreter = Interpreter(model_path=document["model"], num_threads=document["threads"])
        state.update(interpreter=interpreter, input=interpreter.get_input_details()[0])
        state["output"] = interpreter.get_output_details()[0]
        return {"rows": int(state["output"]["shape"][2])}, b""
    interpreter, ids = state["interpreter"], document["ids"]
    if len(ids) != state["length"]:
        interpreter.resize_tensor_input(state["input"]["index"], [1, len(ids)])
        interpreter.allocate_tensors()
        state["length"] = len(ids)
    interpreter.set_tensor(state["input"]["index"], np.array([ids], state["input"]["dtype"]))
    interpreter.invoke()
    return {}, np.ascontiguousarray(interpreter.get_tensor(state["output"]["index"])[0]).tobytes()


serve(handle)
