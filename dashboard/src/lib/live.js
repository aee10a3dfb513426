// The live stream of a server: one connection of server-sent events, opened again when it breaks.
import { History, Model, order } from './model.js';

/** Events of one text/event-stream body, as `{ event, data }`. */
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

export class Live {
  /** `changed` hears of news, `state` of 'connecting', 'live', 'lost', 'denied' and 'absent'. */
  constructor({ key, changed, state, onchange }) {
    Object.assign(this, { key, changed, state, onchange });
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
        if (response.status === 401 || response.status === 403) return this.state('denied');
        const type = response.headers.get('content-type') ?? '';
        if (!response.ok || !type.startsWith('text/event-stream')) {
          if (this.model === null && response.status !== 503) return this.state('absent');
          throw new Error(`status ${response.status}`);
        }
        for await (const { event, data } of eventsOf(response.body)) {
          wait = 500;
          this.#hear(event, data);
        }
      } catch (error) {
        if (this.stopper.signal.aborted) return;
        if (this.model === null && !(error instanceof TypeError)) console.debug('live stream:', error.message);
        if (this.model === null) return this.state('absent');
      }
      this.state('lost');
      await new Promise((resolve) => setTimeout(resolve, wait));
      wait = Math.min(wait * 2, 8000);
    }
  }

  #hear(event, data) {
    if (event === 'snapshot') {
      const snapshot = JSON.parse(data);
      const model = Model.ofSnapshot(snapshot);
      model.history = this.model?.history ?? new History();
      model.onchange = this.onchange;
      this.model = model;
      this.about = snapshot;
      this.#clock(model.at);
      this.state('live');
    } else if (event === 'lines' && this.model) {
      const lines = data.split('\n').filter(Boolean).map((line) => JSON.parse(line));
      for (const line of order(lines)) this.model.apply(line);
      this.model.prune();
      this.#clock(this.model.at);
    } else return;
    this.changed();
  }

  #clock(at) {
    this.offset = at - performance.now() * 1e6;
  }

  /** The server's clock, as far as it is known. */
  get at() {
    return this.model ? Math.max(this.model.at, performance.now() * 1e6 + this.offset) : 0;
  }
}
