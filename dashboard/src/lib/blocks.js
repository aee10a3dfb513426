// The blocks of one layer group and the sequences that use them, reconstructed from block events.

export const FREE = 0;
export const HELD = 1;
export const IDLE = 2;

/** The weight of a use halves in this time. */
export const HALF_LIFE_NS = 5e9;

const COLUMNS = {
  state: Uint8Array,
  stored: Uint8Array,
  /** Its content is being imported. */
  arriving: Uint8Array,
  /** The tier that its content came from, counted from 1; 0 if it was computed, or that is unknown. */
  tier: Uint8Array,
  /** The tiers that have its content too, as far as a server says: bit 0 is the fastest one. */
  below: Uint8Array,
  /** The first sequence that uses the block; for a cached one the last that used it; -1 if none did. */
  owner: Int32Array,
  /** Both are -Infinity if the time is before the first event. */
  born: Float64Array,
  touched: Float64Array,
  uses: Float32Array,
};

export class Blocks {
  constructor({ block_tokens, blocks, window }) {
    this.blockTokens = block_tokens;
    /** Number of blocks; null without a bound. */
    this.bound = blocks ?? null;
    this.window = window ?? null;
    this.high = 0;
    this.size = 0;
    this.held = 0;
    this.idle = 0;
    /** For each used block, the sequences that use it, in order. */
    this.holders = [];
    for (const [name, Type] of Object.entries(COLUMNS)) this[name] = new Type(0);
    this.grow(this.bound !== null && this.bound <= 1 << 20 ? this.bound : 256);
  }

  clone() {
    const copy = new Blocks({ block_tokens: this.blockTokens, blocks: 0 });
    Object.assign(copy, this);
    for (const name of Object.keys(COLUMNS)) copy[name] = this[name].slice();
    copy.holders = this.holders.map((of) => of && of.slice());
    return copy;
  }

  /** Number of blocks that the map shows. */
  get shown() {
    return this.bound ?? Math.max(64, this.high);
  }

  grow(size) {
    if (size <= this.size) return;
    this.size = Math.max(size, this.size * 2);
    for (const [name, Type] of Object.entries(COLUMNS)) {
      const wider = new Type(this.size);
      wider.set(this[name]);
      if (name === 'owner') wider.fill(-1, this[name].length);
      this[name] = wider;
    }
  }

  refs(block) {
    return this.holders[block]?.length ?? 0;
  }

  /** Number of uses of `block`, weighted: older uses count less. */
  heat(block, now) {
    return this.uses[block] * 2 ** ((this.touched[block] - now) / HALF_LIFE_NS);
  }

  #become(block, state) {
    this.grow(block + 1);
    this.high = Math.max(this.high, block + 1);
    const before = this.state[block];
    this.held += (state === HELD) - (before === HELD);
    this.idle += (state === IDLE) - (before === IDLE);
    this.state[block] = state;
  }

  touch(block, at) {
    this.uses[block] = this.heat(block, at) + 1;
    this.touched[block] = at;
  }

  /** `seq` takes a free block. An `arriving` one gets its content from elsewhere (`tier`); it is stored when that is there. */
  take(block, seq, at, arriving = false, tier = 0) {
    this.#become(block, HELD);
    this.holders[block] = [seq];
    this.owner[block] = seq;
    this.stored[block] = 0;
    this.arriving[block] = arriving ? 1 : 0;
    this.tier[block] = tier;
    this.below[block] = 0;
    this.born[block] = at;
    this.uses[block] = 0;
    this.touch(block, at);
  }

  hold(block, seq, at) {
    if (this.state[block] !== HELD || block >= this.size) {
      this.#become(block, HELD);
      this.holders[block] = [];
      this.owner[block] = seq;
    }
    this.holders[block].push(seq);
    this.arriving[block] = 0;
    this.touch(block, at);
  }

  /** `seq` releases the block. If it was the last to use it, the block goes to `state`. */
  release(block, seq, state, at) {
    if (block >= this.size) return;
    this.arriving[block] = 0;
    const holders = this.holders[block] ?? [];
    const i = holders.indexOf(seq);
    if (i >= 0) holders.splice(i, 1);
    if (holders.length > 0 && state === HELD) {
      this.owner[block] = holders[0];
      return;
    }
    if (state === HELD && this.state[block] !== HELD) return;
    this.#become(block, state === HELD ? (this.stored[block] ? IDLE : FREE) : state);
    if (this.state[block] === FREE) this.tier[block] = this.below[block] = 0;
    this.holders[block] = undefined;
    this.touched[block] = at;
  }

  /** What `from` held is in `to` now, a free block. */
  move(from, to) {
    const state = from < this.size ? this.state[from] : FREE;
    this.#become(to, state);
    for (const name of Object.keys(COLUMNS)) {
      if (name !== 'state' && from < this.size) this[name][to] = this[name][from];
    }
    this.holders[to] = this.holders[from];
    this.holders[from] = undefined;
    this.#become(from, FREE);
    this.tier[from] = this.below[from] = 0;
    this.stored[from] = 0;
  }

  /** Another capacity, in tokens. */
  resize(tokens) {
    if (tokens !== undefined && this.bound !== null) this.bound = Math.floor(tokens / this.blockTokens);
  }

  store(block) {
    this.stored[block] = 1;
    this.arriving[block] = 0;
  }

  /** Replaces what is known of the blocks that tiers have: for each tier runs of blocks, `[first, how many]`. */
  tellBelow(tiers) {
    this.below.fill(0);
    tiers.forEach((runs, tier) => {
      for (const [first, n] of runs) {
        for (let b = first; b < Math.min(first + n, this.size); b++) {
          if (this.state[b] !== FREE) this.below[b] |= 1 << tier;
        }
      }
    });
  }

  /** Number of used blocks that this tier has too, counted from 0; of null those that no tier has. */
  alsoIn(tier) {
    let n = 0;
    for (let b = 0; b < this.high; b++) n += this.state[b] !== FREE && (tier === null ? this.below[b] === 0 : (this.below[b] >> tier) & 1);
    return n;
  }

  /** Number of blocks whose content came from this tier, counted from 1. */
  from(tier) {
    let n = 0;
    for (let b = 0; b < this.high; b++) n += this.tier[b] === tier;
    return n;
  }

  /** Adds a block from a snapshot: used by `seq`, or cached without users if `seq` is null. Its past is unknown. */
  adopt(block, seq) {
    if (seq === null || this.refs(block) === 0) {
      this.#become(block, seq === null ? IDLE : HELD);
      this.holders[block] = seq === null ? undefined : [];
      this.owner[block] = seq ?? -1;
      this.stored[block] = seq === null ? 1 : 0;
      this.tier[block] = 0;
      this.uses[block] = 0;
      this.born[block] = -Infinity;
      this.touched[block] = -Infinity;
    }
    if (seq !== null) this.holders[block].push(seq);
  }

  /** A block from a snapshot is being imported from `tier`. */
  adoptArriving(block, seq, tier) {
    this.adopt(block, seq);
    this.arriving[block] = 1;
    this.tier[block] = tier;
  }
}
