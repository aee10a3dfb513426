/** Runs what it is asked to, but not more often than every `every` ms; what comes too early runs once, when the time is up. */
export class Throttle {
  #last = -Infinity;
  #timer = null;

  /** `clock` has the `now`, `setTimeout` and `clearTimeout` of a browser, unless a test brings its own. */
  constructor(every, run, clock = { now: () => performance.now(), setTimeout: (...a) => setTimeout(...a), clearTimeout: (id) => clearTimeout(id) }) {
    Object.assign(this, { every, run, clock });
  }

  ask() {
    const left = this.#last + this.every - this.clock.now();
    if (left <= 0) this.force();
    else this.#timer ??= this.clock.setTimeout(() => this.force(), left);
  }

  /** Runs now, whenever it ran last. */
  force() {
    if (this.#timer !== null) this.clock.clearTimeout(this.#timer);
    this.#timer = null;
    this.#last = this.clock.now();
    this.run();
  }
}
