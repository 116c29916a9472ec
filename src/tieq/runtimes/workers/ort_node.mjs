// onnxruntime-web in Node.js: requests are JSON lines on stdin, answers go to a descriptor of their own.

import fs from "node:fs";
import path from "node:path";
import readline from "node:readline";
import { pathToFileURL } from "node:url";
import * as model from "./ort_session.mjs";

const answers = Number(process.env.TIEQ_ANSWERS);
let ort = null;

async function handle(request) {
  if (request.model) {
    ort = await import(pathToFileURL(path.join(request.libraries, "onnxruntime-web/dist/ort.node.min.mjs")));
    const read = (name) => ({ path: name, data: fs.readFileSync(path.join(request.folder, name)) });
    return [await model.load(ort, fs.readFileSync(request.model), request.external.map(read), {}), new Float32Array(0)];
  }
  return [{}, await model.logits(ort, request.ids)];
}

function answer(header, data) {
  const payload = Buffer.from(data.buffer, data.byteOffset, data.byteLength);
  const line = JSON.stringify({ ...header, bytes: payload.length }) + "\n";
  const content = Buffer.concat([Buffer.from(line), payload]);
  for (let at = 0; at < content.length; ) at += fs.writeSync(answers, content, at);
}

for await (const line of readline.createInterface({ input: process.stdin })) {
  try {
    answer(...(await handle(JSON.parse(line))));
  } catch (error) {
    answer({ error: String(error?.message ?? error) }, new Float32Array(0));
  }
}
