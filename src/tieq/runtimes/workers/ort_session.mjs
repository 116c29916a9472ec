// A causal language model in onnxruntime-web; the same in Node.js and on a page.

let session = null;

/** Load a model from bytes; `externalData` is a list of `{path, data}`. */
export async function load(ort, model, externalData, options) {
  ort.env.logLevel = "error";
  ort.env.wasm.numThreads = 1;
  session = await ort.InferenceSession.create(model, {
    executionProviders: ["wasm"],
    externalData,
    ...options,
  });
  return { version: ort.env.versions.web ?? ort.env.versions.common };
}

/** Float32 logits `[length, vocab]` of one sequence, from an empty cache. */
export async function logits(ort, ids) {
  const length = ids.length;
  const numbers = (of) => new ort.Tensor("int64", BigInt64Array.from({ length }, (_, at) => BigInt(of(at))), [1, length]);
  const feed = {};
  for (const input of session.inputMetadata) {
    if (input.name === "input_ids") feed[input.name] = numbers((at) => ids[at]);
    else if (input.name === "attention_mask") feed[input.name] = numbers(() => 1);
    else if (input.name === "position_ids") feed[input.name] = numbers((at) => at);
    else if (input.name.includes("past")) {
      const shape = input.shape.map((extent) => (typeof extent === "number" ? extent : 0));
      shape[0] = 1;
      feed[input.name] = new ort.Tensor("float32", new Float32Array(0), shape);
    }
  }
  const found = await session.run(feed, ["logits"]);
  return found.logits.data;
}
