// Recent changes of blocks, which glow on the map for a moment.

const GLOW_MS = 600;
const KINDS = { alloc: 'given', copy_on_write: 'given', hit: 'found', share: 'found', evict: 'gone' };

export class Flashes {
  /** Maps `[g, block]`, packed into one number, to `[kind, when]`, oldest first. */
  #all = new Map();

  /** `now` returns the time in milliseconds. */
  constructor(now = () => performance.now()) {
    this.now = now;
  }

  add(g, block, change) {
    const kind = KINDS[change];
    if (!kind) return;
    // Expire here too: if no map is drawn, nothing else would.
    this.#expire();
    const id = g * 2 ** 32 + block;
    this.#all.delete(id);
    this.#all.set(id, [kind, this.now()]);
  }

  /** The changes in group `g`, as `[block, kind, strength]`; the strength falls from 1 to 0. */
  *of(g) {
    this.#expire();
    const now = this.now();
    for (const [id, [kind, since]] of this.#all) {
      if (Math.floor(id / 2 ** 32) === g) yield [id % 2 ** 32, kind, 1 - (now - since) / GLOW_MS];
    }
  }

  get any() {
    this.#expire();
    return this.#all.size > 0;
  }

  clear() {
    this.#all.clear();
  }

  #expire() {
    const past = this.now() - GLOW_MS;
    for (const [id, [, since]] of this.#all) {
      if (since > past) break;
      this.#all.delete(id);
    }
  }
}
