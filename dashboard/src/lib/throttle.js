/** Calls `run` at most once every `every` ms. Calls that come too early are merged into one at the end of that time. */
export class Throttle {
  #last = -Infinity;
  #timer = null;

  /** `clock` has `now`, `setTimeout` and `clearTimeout`; tests pass their own. */
  constructor(every, run, clock = { now: () => performance.now(), setTimeout: (...a) => setTimeout(...a), clearTimeout: (id) => clearTimeout(id) }) {
    Object.assign(this, { every, run, clock });
  }

  ask() {
    const left = this.#last + this.every - this.clock.now();
    if (left <= 0) this.force();
    else this.#timer ??= this.clock.setTimeout(() => this.force(), left);
  }

  /** Runs now, however recent the last run is. */
  force() {
    if (this.#timer !== null) this.clock.clearTimeout(this.#timer);
    this.#timer = null;
    this.#last = this.clock.now();
    this.run();
  }
}
