// Requests to the server that the page comes from. The API key is kept in memory only.

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Client {
  key = "";

  async #fetch(path, options = {}) {
    const headers = { ...options.headers, ...(this.key && { authorization: `Bearer ${this.key}` }) };
    const answer = await fetch(path, { ...options, headers });
    if (answer.ok) return answer;
    const body = await answer.json().catch(() => ({}));
    throw new ServerError(answer.status, body.error?.message ?? `the server answered ${answer.status}`);
  }

  /** The card of the served model. */
  async model() {
    const answer = await this.#fetch("v1/models");
    return (await answer.json()).data[0];
  }

  /** The chunks of a streamed answer, with the trees of its rounds. */
  async *stream(path, body, signal) {
    const content = JSON.stringify({ ...body, stream: true, trace: true });
    const headers = { "content-type": "application/json" };
    const answer = await this.#fetch(path, { method: "POST", headers, body: content, signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let waiting = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const events = (waiting + part.value).split("\n\n");
      waiting = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]" || event.startsWith(":")) continue;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ServerError(500, chunk.error.message);
        yield chunk;
      }
    }
  }

  /** Values of all metrics by name, each with its labels. */
  async metrics() {
    const text = await (await this.#fetch("metrics")).text();
    const found = new Map();
    for (const [, name, labels, value] of text.matchAll(/^([\w:]+)\{(.*)\} (\S+)$/gm)) {
      const named = Object.fromEntries([...labels.matchAll(/(\w+)="([^"]*)"/g)].map((one) => one.slice(1)));
      if (!found.has(name)) found.set(name, []);
      found.get(name).push({ labels: named, value: Number(value) });
    }
    return found;
  }
}
