const KEPT_TURNS = 60000;
const KEPT_EVENTS = 400000;

/** Number of items whose time, of `timeOf`, is not after `at`. The items are in order of time. */
export function countUntil(items, at, timeOf) {
  let [low, high] = [0, items.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (timeOf(items[middle]) <= at) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** All events over time, for the charts and the histories of blocks. */
export class History {
  constructor() {
    this.turns = [];
    this.firsts = [];
    this.admits = [];
    this.ends = [];
    this.events = [];
  }
  turn(from, to, prefill, decode, group) {
    this.turns.push({ from, to, prefill, decode, held: group.held, idle: group.idle });
  }
  firstToken(at, ttft) {
    this.firsts.push([at, ttft]);
  }
  admit(at, prompt, hit) {
    this.admits.push([at, prompt, hit]);
  }
  end(at, { first, generated }) {
    if (first !== null && generated > 1) this.ends.push([at, (at - first) / (generated - 1)]);
  }
  block(at, ...event) {
    this.events.push([at, ...event]);
  }
  /** All events of one block. */
  life(g, block) {
    return this.events.filter((event) => event[1] === g && event[3] === block);
  }
  prune() {
    const cut = (list, most) => list.length > most * 1.25 && list.splice(0, list.length - most);
    cut(this.turns, KEPT_TURNS);
    cut(this.events, KEPT_EVENTS);
    for (const list of [this.firsts, this.admits, this.ends]) cut(list, KEPT_TURNS);
  }
}
