/** Lets so many in at a time. The others wait, in order. */
export class Slots {
  #free;
  #waiting = [];

  constructor(n) {
    this.#free = n;
  }

  get free() {
    return this.#free > 0;
  }

  /** Resolves when there is a place. Fails if `signal` is aborted before. */
  async enter(signal) {
    signal.throwIfAborted();
    if (this.#free > 0) {
      this.#free -= 1;
      return;
    }
    await new Promise((resolve, reject) => {
      const enter = () => {
        signal.removeEventListener('abort', giveUp);
        resolve();
      };
      const giveUp = () => {
        this.#waiting = this.#waiting.filter((other) => other !== enter);
        reject(signal.reason);
      };
      signal.addEventListener('abort', giveUp);
      this.#waiting.push(enter);
    });
  }

  /** Gives a place to the first one that waits. */
  leave() {
    const enter = this.#waiting.shift();
    if (enter) enter();
    else this.#free += 1;
  }
}
