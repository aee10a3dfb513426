import { CLOCK } from './clock.js';

/** Calls `run` at most once every `every` ms. Calls that come too early are merged into one at the end of that time. */
export class Throttle {
  #last = -Infinity;
  #timer = null;

  constructor(every, run, clock = CLOCK) {
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
