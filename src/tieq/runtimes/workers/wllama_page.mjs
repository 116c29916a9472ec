// wllama on a page: it gives the probabilities of the next token, so that a sequence is decoded token by token.

import { Wllama } from "/libraries/@wllama/wllama/esm/index.js";
import { bytes, serve } from "./page.mjs";

const wllama = new Wllama(
  { "single-thread/wllama.wasm": "/libraries/@wllama/wllama/esm/single-thread/wllama.wasm" },
  { suppressNativeLog: true },
);
// The smallest float32: probabilities underflow to zero, whose logarithm nothing can be computed with.
const SMALLEST = 1.4e-45;
let rows = 0;

async function load(job) {
  const model = new Blob([await bytes(`/model/${job.model}`)]);
  await wllama.loadModel([model], { n_ctx: job.length, n_batch: job.length, n_threads: 1, seed: 0 });
  rows = wllama.getModelMetadata().hparams.nVocab;
  return [{ rows, agent: navigator.userAgent }, new Float32Array(0)];
}

serve(async (job) => {
  if (job.model) return load(job);
  await wllama.kvClear();
  await wllama.samplingInit({ temp: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, penalty_repeat: 1.0 });
  const found = new Float32Array(job.ids.length * rows);
  for (let at = 0; at < job.ids.length; at++) {
    await wllama.decode([job.ids[at]], {});
    for (const { token, p } of await wllama.getLogits(-1)) {
      found[at * rows + token] = Math.log(Math.max(p, SMALLEST));
    }
  }
  return [{}, found];
});
