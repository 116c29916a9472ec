// onnxruntime-web on a page.

import * as ort from "/libraries/onnxruntime-web/dist/ort.wasm.min.mjs";
import * as model from "./ort_session.mjs";
import { bytes, serve } from "./page.mjs";

ort.env.wasm.wasmPaths = "/libraries/onnxruntime-web/dist/";

serve(async (job) => {
  if (!job.model) return [{}, await model.logits(ort, job.ids)];
  const external = await Promise.all(job.external.map(async (name) => ({ path: name, data: await bytes(`/model/${name}`) })));
  const loaded = await model.load(ort, await bytes(`/model/${job.model}`), external, {});
  return [{ ...loaded, agent: navigator.userAgent }, new Float32Array(0)];
});
