// A load of many sequences, as the lines of a live stream.
const MS = 1e6;
let instances = 0;

/** A cache of `blocks` blocks, nearly full, and `running` sequences of `long` blocks, of which every other one shares the first half with another. */
export class Load {
  constructor({ blocks = 100_000, running = 256, long = 250, model = 'pretended' } = {}) {
    Object.assign(this, { blocks, long, model });
    /** Each load is another server. */
    this.instance = `kvist-${instances++}`;
    this.at = 1e9;
    this.n = 0;
    this.next = 0;
    this.turns = 0;
    this.free = Array.from({ length: blocks }, (_, i) => blocks - 1 - i);
    this.idle = [];
    this.holders = new Map();
    this.sequences = [];
    const silent = [];
    while (this.sequences.length < running) this.#begin(silent, []);
    while (this.free.length > blocks / 100) {
      this.#begin(silent, []);
      this.#end(silent, []);
    }
  }

  #take(events, seq) {
    if (this.free.length === 0) {
      const gone = this.idle.shift();
      if (gone === undefined) throw new Error(`no block of ${this.blocks} is free or idle: fewer sequences, or shorter ones`);
      events.push([0, 'evict', gone, null, 'make_room']);
      this.free.push(gone);
    }
    const block = this.free.pop();
    this.holders.set(block, 1);
    events.push([0, 'alloc', block, seq, 'append']);
    return block;
  }

  #begin(events, lines) {
    const seq = this.next++;
    const trunk = this.sequences.at(-(seq % 8))?.table ?? [];
    const table = trunk.slice(0, seq % 2 === 0 ? this.long / 2 : 0);
    for (const block of table) {
      this.holders.set(block, this.holders.get(block) + 1);
      events.push([0, 'hit', block, seq, 'open']);
    }
    const hit = table.length * 16;
    while (table.length < this.long) table.push(this.#take(events, seq));
    const prompt_tokens = this.long * 16;
    this.sequences.push({ seq, table, tokens: prompt_tokens });
    lines.push({ n: this.n++, at: this.at, arrive: { id: seq, arrival_ns: this.at - 20 * MS, prompt_tokens, max_new: 500 } });
    lines.push({ step: this.n, at: this.at, admit: seq, seq, hit }, { step: this.n, at: this.at, chunk: seq, first: hit, tokens: prompt_tokens - hit });
  }

  #end(events, lines) {
    const { seq, table, tokens } = this.sequences.shift();
    lines.push({ step: this.n, at: this.at, end: seq, how: 'stop', generated: tokens - this.long * 16 });
    for (const block of table) {
      const left = this.holders.get(block) - 1;
      if (left > 0) this.holders.set(block, left);
      else {
        this.holders.delete(block);
        this.idle.push(block);
      }
      events.push([0, left > 0 ? 'release' : 'idle', block, seq, 'remove']);
    }
  }

  snapshot() {
    return {
      format: 'kvist-live', version: 1, instance_id: this.instance, model: this.model, at: this.at, bytes_per_token: 4096, bound_bytes: this.blocks * 65536,
      groups: [{ block_tokens: 16, blocks: this.blocks, window: null }],
      requests: this.sequences.map(({ seq, tokens }) => ({
        id: seq, running: true, seq, arrival_ns: this.at - 1e9, admitted_ns: this.at - 9e8, first_token_ns: this.at - 8e8,
        prompt_tokens: this.long * 16, max_new: 500, generated: tokens - this.long * 16, cached: tokens, hit_tokens: 0,
      })),
      sequences: this.sequences.map(({ seq, tokens, table }) => ({ seq, len: tokens, tables: [table] })),
      idle: [this.idle.toSorted((a, b) => a - b)],
      counters: {},
    };
  }

  /** One step: every sequence writes a token; one request in `every` turns comes, and one goes. */
  turn(every = 1) {
    const lines = [{ n: this.n++, at: this.at, steps: 1, elapsed: 80 * MS, sampled: [], finished: [] }];
    const [before, after] = [[], []];
    const ending = [];
    for (const sequence of this.sequences) {
      sequence.tokens += 1;
      if (sequence.tokens > sequence.table.length * 16) sequence.table.push(this.#take(before, sequence.seq));
    }
    this.turns += 1;
    const moves = this.turns % every === 0;
    if (moves) this.#begin(before, lines);
    lines.push({ step: this.n, at: this.at, blocks: before });
    this.at += 80 * MS;
    if (moves) this.#end(after, ending);
    lines.push(...ending, { step: this.n, at: this.at, blocks: after });
    this.at += 20 * MS;
    return lines;
  }
}
