// The live stream of a server: one connection with server-sent events, reopened when it breaks.
import { CLOCK } from './clock.js';
import { History } from './history.js';
import { Model, order } from './model.js';
import { BadKey, eventsOf, messageOf, withKey } from './stream.js';

/** The version of the stream that this page reads. */
const VERSION = 1;

export class Live {
  /**
   * Calls `state` with 'live', 'lost', 'denied' (no key, or an unknown one), 'limited' (the key is not an admin's),
   * 'absent' (there is no such stream) or 'refused', and with the reason, if one is known. Calls `changed` when the model
   * has changed, and `begun` when another server answers, or the same one after a restart.
   */
  constructor({ key, changed, state, begun, onchange, clock = CLOCK }) {
    Object.assign(this, { key, changed, state, begun, onchange, clock });
    this.model = null;
    this.stopper = new AbortController();
    this.#run();
  }

  stop() {
    this.stopper.abort();
  }

  async #run() {
    this.wait = 500;
    while (!this.stopper.signal.aborted) {
      let reason;
      try {
        const final = await this.#connection();
        if (final) return this.state(final);
      } catch (error) {
        if (error instanceof BadKey) return this.state('denied', error.message);
        reason = error.message;
      }
      if (this.stopper.signal.aborted) return;
      // If the server has too many listeners now, a later attempt may succeed.
      this.state(this.model === null ? 'refused' : 'lost', reason);
      await new Promise((resolve) => setTimeout(resolve, this.wait));
      this.wait = Math.min(this.wait * 2, 8000);
    }
  }

  /** Listens until the connection ends. Returns a state after which it is of no use to try again. */
  async #connection() {
    const response = await this.#ask(withKey(this.key(), { accept: 'text/event-stream' }));
    if (response.status === 401) return 'denied';
    if (response.status === 403) return 'limited';
    if (response.status === 404 && this.model === null) return 'absent';
    if (!response.ok) throw new Error(await messageOf(response));
    const type = response.headers.get('content-type') ?? '';
    if (!type.startsWith('text/event-stream')) {
      if (this.model === null) return 'absent';
      throw new Error(`an answer of type ${type || 'unknown'}`);
    }
    for await (const { event, data } of eventsOf(response.body, this.clock)) {
      this.wait = 500;
      this.#hearOrLog(event, data);
    }
    if (this.model === null) throw new Error('the stream ended before it began');
  }

  async #ask(headers) {
    const { signal } = this.stopper;
    try {
      return await fetch('kvist/live', { headers, signal });
    } catch (error) {
      // Browsers have different words for it.
      throw signal.aborted ? error : new Error('no answer');
    }
  }

  /** An event that cannot be read is a fault of the server or of this page: the console gets all of it. */
  #hearOrLog(event, data) {
    try {
      this.#hear(event, data);
    } catch (error) {
      console.error(error);
      throw new Error(`an event "${event}" cannot be read: ${error.message}`);
    }
  }

  #hear(event, data) {
    if (event === 'snapshot') {
      this.#start(JSON.parse(data));
    } else if (event === 'lines' && this.model) {
      const lines = data.split('\n').filter(Boolean).map((line) => JSON.parse(line));
      for (const line of order(lines)) this.model.apply(line);
      this.model.prune();
      this.#setClock(this.model.at);
    } else if (event === 'sessions' && this.model) {
      this.model.tellSessions(JSON.parse(data));
    } else if (event === 'tiers' && this.model) {
      this.model.tellTiers(JSON.parse(data));
    } else if (event === 'below' && this.model) {
      this.model.tellBelow(JSON.parse(data));
    } else return;
    this.changed();
  }

  #start(snapshot) {
    if (snapshot.version !== VERSION) throw new Error(`the stream is of version ${snapshot.version}, and this page reads version ${VERSION}: reload the page`);
    const model = Model.ofSnapshot(snapshot);
    const before = this.model;
    const same = before !== null && snapshot.instance_id === this.about.instance_id;
    if (same) model.resume(before);
    else model.history = new History();
    model.onchange = this.onchange;
    this.model = model;
    this.about = snapshot;
    this.#setClock(model.at);
    if (before !== null && !same) this.begun();
    this.state('live');
  }

  #setClock(at) {
    this.offset = at - performance.now() * 1e6;
  }

  /** An estimate of the server's clock, in nanoseconds. */
  get at() {
    return this.model ? Math.max(this.model.at, performance.now() * 1e6 + this.offset) : 0;
  }
}
