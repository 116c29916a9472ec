// A page's side of the protocol: it asks for jobs and posts a JSON line with the answer's bytes behind it.

export async function serve(handle) {
  for (;;) {
    const job = await (await fetch("/job", { method: "POST" })).json();
    let header = {};
    let data = new Float32Array(0);
    try {
      [header, data] = await handle(job);
    } catch (error) {
      header = { error: String(error?.message ?? error) };
    }
    const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
    const line = JSON.stringify({ ...header, bytes: bytes.length }) + "\n";
    await fetch("/answer", { method: "POST", body: new Blob([line, bytes]) });
  }
}

export async function bytes(address) {
  const response = await fetch(address);
  if (!response.ok) throw new Error(`${address}: ${response.status}`);
  return new Uint8Array(await response.arrayBuffer());
}
