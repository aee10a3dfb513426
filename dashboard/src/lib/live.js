// The live stream of a server: one connection with server-sent events, reopened when it breaks.
import { History, Model, order } from './model.js';

/** The events of a text/event-stream body, as `{ event, data }`. */
export async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  let event = 'message';
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      let from = 0;
      for (let to; (to = text.indexOf('\n', from)) >= 0; from = to + 1) {
        const line = text.slice(from, to).replace(/\r$/, '');
        if (line === '') {
          if (data.length > 0) yield { event, data: data.join('\n') };
          event = 'message';
          data = [];
        } else if (line.startsWith('event:')) event = line.slice(6).trim();
        else if (line.startsWith('data:')) data.push(line.slice(5).replace(/^ /, ''));
      }
      text = text.slice(from);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The server's message in an error response. */
export async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `status ${response.status}`; // the body is not in the format of errors: report the status
  }
}

export class Live {
  /**
   * Calls `state` with 'live', 'lost', 'denied' (no key, or an unknown one), 'limited' (the key is not an admin's),
   * 'absent' (there is no such stream) or 'refused' (with the server's message). Calls `changed` when the model has
   * changed, and `begun` when another server answers, or the same one after a restart.
   */
  constructor({ key, changed, state, begun, onchange }) {
    Object.assign(this, { key, changed, state, begun, onchange });
    this.model = null;
    this.stopper = new AbortController();
    this.#run();
  }

  stop() {
    this.stopper.abort();
  }

  async #run() {
    let wait = 500;
    while (!this.stopper.signal.aborted) {
      try {
        const headers = { accept: 'text/event-stream' };
        if (this.key()) headers.authorization = `Bearer ${this.key()}`;
        const response = await fetch('kvist/live', { headers, signal: this.stopper.signal });
        if (response.status === 401) return this.state('denied');
        if (response.status === 403) return this.state('limited');
        const type = response.headers.get('content-type') ?? '';
        if (!response.ok) {
          if (response.status === 404 && this.model === null) return this.state('absent');
          throw new Error(await messageOf(response));
        }
        if (!type.startsWith('text/event-stream')) {
          if (this.model === null) return this.state('absent');
          throw new Error(`an answer of type ${type || 'unknown'}`);
        }
        for await (const { event, data } of eventsOf(response.body)) {
          wait = 500;
          this.#hear(event, data);
        }
        if (this.model === null) throw new Error('the stream ended before it began');
      } catch (error) {
        if (this.stopper.signal.aborted) return;
        // If the server has too many listeners now, a later attempt may succeed.
        if (this.model === null) this.state('refused', error instanceof TypeError ? 'no answer' : error.message);
      }
      if (this.model !== null) this.state('lost');
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(wait * 2, 8000);
    }
  }

  #hear(event, data) {
    if (event === 'snapshot') {
      const snapshot = JSON.parse(data);
      const model = Model.ofSnapshot(snapshot);
      const before = this.model;
      // A server's clock starts at zero with the server.
      const same = before !== null && model.at >= before.at && snapshot.model === this.about.model;
      if (same) model.resume(before);
      else model.history = new History();
      model.onchange = this.onchange;
      this.model = model;
      this.about = snapshot;
      this.#clock(model.at);
      if (before !== null && !same) this.begun();
      this.state('live');
    } else if (event === 'lines' && this.model) {
      const lines = data.split('\n').filter(Boolean).map((line) => JSON.parse(line));
      for (const line of order(lines)) this.model.apply(line);
      this.model.prune();
      this.#clock(this.model.at);
    } else if (event === 'sessions' && this.model) {
      this.model.tell(JSON.parse(data).sessions);
    } else if (event === 'tiers' && this.model) {
      this.model.tellTiers(JSON.parse(data));
    } else if (event === 'below' && this.model) {
      this.model.tellBelow(JSON.parse(data));
    } else return;
    this.changed();
  }

  #clock(at) {
    this.offset = at - performance.now() * 1e6;
  }

  /** An estimate of the server's clock, in nanoseconds. */
  get at() {
    return this.model ? Math.max(this.model.at, performance.now() * 1e6 + this.offset) : 0;
  }
}
