// The state of a cache and its requests: the reducer for both recordings and the live stream.
//
// Lines are applied in the order that `order` returns. Times are nanoseconds of the recorded clock.
import { Blocks, FREE, HELD, IDLE } from './blocks.js';
import { verified } from './drafts.js';

/** Number of ended requests that a live view keeps. */
const KEPT_REQUESTS = 600;

/** Sorts the lines of whole scheduler steps by time. The end of a step becomes a line of its own. */
export function order(lines) {
  const all = [];
  for (const line of lines) {
    all.push(line);
    if (line.elapsed !== undefined) all.push({ at: line.at + line.elapsed, done: line });
  }
  let sorted = true;
  for (let i = 1; i < all.length && sorted; i++) sorted = (all[i - 1].at ?? 0) <= (all[i].at ?? 0);
  return sorted ? all : all.sort((a, b) => (a.at ?? 0) - (b.at ?? 0)); // the sort is stable
}

/**
 * Tiers by their names: `counted` tokens were loaded since the page began to listen, or the recording began; `told` is what a server
 * says of the tier, if it is a server. Null without tiers.
 */
const tiersOf = (names) => (names?.length ? names.map((name) => ({ name, counted: 0, told: null })) : null);

/** Tokens of a load, by tier. */
export function partsOf({ hit, tokens, runs }) {
  const parts = [];
  let from = hit;
  for (const { tier, until } of runs) {
    const to = Math.min(until, hit + tokens);
    if (tier !== null && to > from) parts[tier] = (parts[tier] ?? 0) + to - from;
    from = Math.max(from, to);
  }
  return parts;
}

/** "96 from ram, 32 from disk", of tokens by tier. Empty if there are none. */
export const sourcesOf = (tiers, tokens) => (tiers ?? []).map(({ name }, tier) => tokens[tier] > 0 && `${tokens[tier]} from ${name}`).filter(Boolean).join(', ');

/** A block that is copied to a tier before it is evicted becomes free when the copy has ended. */
export const isEviction = (change, reason) => change === 'evict' || (change === 'free' && reason === 'unpin');

const bump = (counts, key, n = 1) => counts.set(key, (counts.get(key) ?? 0) + n);

export class Model {
  constructor(groups = [{ block_tokens: 16, blocks: null, window: null }]) {
    this.at = 0;
    this.groups = groups.map((group) => new Blocks(group));
    /** Requests by id: all live ones, and the ended ones that are kept. */
    this.requests = new Map();
    /** Sequences by id: `{ seq, request, tables, parent }`. */
    this.sequences = new Map();
    /** The server's sessions, running or idle: `{ id, parent, tokens, running, tables }`. Null if it reports none. */
    this.sessions = null;
    /** How many more sessions the server has. */
    this.moreSessions = 0;
    this.resting = [];
    /** Ids of the requests that have not ended. */
    this.live = new Set();
    /** The tiers below the cache, the fastest first; null without tiers. See `tiersOf`. */
    this.tiers = null;
    /** Bytes on their way from the tiers and to them, as a server says; null if that is unknown. */
    this.tierBytes = null;
    /** The layer group of whose blocks a server says which tiers have them, too; null if it does not. */
    this.belowGroup = null;
    this.turn = null;
    this.misses = new Map();
    this.changes = new Map();
    this.totals = { prompt: 0, hit: 0, evicted: 0, preempted: 0 };
    /** A `History`, if one is to be kept. */
    this.history = null;
    /** Names and sessions of the requests that arrived before this page was opened: see `#request`. */
    this.names = {};
    /** Called with (group, block, change) on every change of a block. */
    this.onchange = null;
  }

  /** The layer group that figures and charts show: the first one without a window, because it keeps all blocks. */
  get mainGroup() {
    return Math.max(0, this.groups.findIndex(({ window }) => window === null));
  }

  /** A copy to return to. Shares ended requests and segments, which are replaced and never modified. */
  clone() {
    const copy = new Model([]);
    Object.assign(copy, this);
    copy.groups = this.groups.map((group) => group.clone());
    copy.requests = new Map([...this.requests].map(([id, r]) => [id, r.phase === 'ended' ? r : { ...r, segments: r.segments.slice() }]));
    copy.sequences = new Map(
      [...this.sequences].map(([seq, s]) => [seq, { ...s, tables: s.tables.map((table) => table.slice()), doubled: s.doubled.slice() }]),
    );
    copy.live = new Set(this.live);
    copy.misses = new Map(this.misses);
    copy.changes = new Map(this.changes);
    copy.totals = { ...this.totals };
    copy.turn = this.turn && { ...this.turn };
    copy.tiers = this.tiers && this.tiers.map((tier) => ({ ...tier }));
    copy.history = null;
    copy.onchange = null;
    return copy;
  }

  static ofSnapshot(snapshot) {
    const model = new Model(snapshot.groups);
    model.names = snapshot.names ?? {};
    const at = snapshot.at ?? 0;
    model.at = at;
    model.tiers = tiersOf(snapshot.tiers);
    for (const r of snapshot.requests ?? []) {
      const request = model.#request(r.id, r.arrival_ns);
      Object.assign(request, {
        prompt: r.prompt_tokens,
        admitted: r.admitted_ns,
        first: r.first_token_ns,
        hit: r.hit_tokens,
        seq: r.seq ?? null,
        computed: r.cached,
        known: r.prompt_tokens + r.generated,
        generated: r.generated,
        loaded: r.loaded ?? [],
      });
      request.phase = r.running
        ? r.generated > 0 ? 'decode' : 'prefill'
        : r.loading ? 'loading' : r.admitted_ns === null ? 'queued' : 'paused';
      // When the load began is unknown.
      if (r.loading) Object.assign(request, { since: at, loading: r.loading });
      if (r.admitted_ns !== null) request.segments.push(['queued', r.arrival_ns, r.admitted_ns]);
      if (r.first_token_ns) request.segments.push(['prefill', r.admitted_ns, r.first_token_ns], ['decode', r.first_token_ns, at]);
    }
    for (const { seq, tables } of snapshot.sequences ?? []) {
      const sequence = model.#sequence(seq);
      tables.forEach((table, g) => {
        sequence.tables[g] = table.slice();
        for (const block of table) {
          if (block !== null) model.groups[g].adopt(block, seq);
        }
      });
    }
    for (const r of model.requests.values()) {
      if (r.seq === null) continue;
      // The blocks that are being loaded are in no table yet.
      r.loading?.blocks?.forEach((blocks, g) => {
        const { tables } = model.#sequence(r.seq);
        for (const block of blocks) {
          model.groups[g].adoptArriving(block, r.seq, model.#source(r, g, tables[g].length));
          tables[g].push(block);
        }
      });
      if (model.sequences.has(r.seq)) model.sequences.get(r.seq).request = r.id;
    }
    (snapshot.idle ?? []).forEach((blocks, g) => blocks.forEach((block) => model.groups[g].adopt(block, null)));
    return model;
  }

  /** Continues `before` after a reconnect to the same server: keeps its totals and its ended requests. */
  resume(before) {
    this.history = before.history;
    this.totals = before.totals;
    this.misses = before.misses;
    this.changes = before.changes;
    const now = this.requests;
    this.requests = new Map([...before.requests].filter(([id, request]) => request.phase === 'ended' && !now.has(id)));
    for (const [id, request] of now) this.requests.set(id, request);
  }

  #request(id, arrival) {
    let request = this.requests.get(id);
    if (!request || request.phase === 'ended') {
      // The request's name in the log, and its session, if the server reports them.
      const { name = null, session = null } = this.names[id] ?? {};
      request = {
        id, name, session, arrival, prompt: 0, admitted: null, first: null, ended: null, how: null, hit: 0, seq: null,
        computed: 0, known: 0, generated: 0, phase: 'queued', segments: [], chunked: false, preemptions: 0, miss: null,
        // Decode steps, the tokens that they gave, and the draft of the last one that had one: see `verified`.
        passes: 0, made: 0, draft: null,
        // The beginning of its current phase, if it waits or is loaded; what is being loaded: `{ hit, tokens, runs }`; and tokens that
        // were loaded, by tier.
        since: arrival, loading: null, loaded: [],
      };
      this.requests.delete(id);
      this.requests.set(id, request);
      this.live.add(id);
    }
    return request;
  }

  #sequence(seq) {
    let sequence = this.sequences.get(seq);
    if (!sequence) {
      // `doubled`, per group: a block that the sequence has copied and will release.
      sequence = { seq, request: null, parent: null, tables: this.groups.map(() => []), doubled: [] };
      this.sequences.set(seq, sequence);
    }
    return sequence;
  }

  #span(request, kind, from, to) {
    const { segments } = request;
    const last = segments.at(-1);
    // There are gaps between a server's steps: continued decoding is one segment all the same. A preempted request gets
    // a segment of another kind in between.
    if (last?.[0] === kind && (kind === 'decode' || last[2] >= from)) segments[segments.length - 1] = [kind, last[1], to];
    else if (to > from) segments.push([kind, from, to]);
  }

  /** Applies one line; lines must come in the order that `order` returns. */
  apply(line) {
    const { at } = line;
    if (at !== undefined) this.at = Math.max(this.at, at);
    if (line.blocks) this.#blocks(line);
    else if (line.done) this.#done(line.at, line.done);
    else if (line.arrive) {
      const { id, arrival_ns, prompt_tokens, name = null, session = null } = line.arrive;
      Object.assign(this.#request(id, arrival_ns), { name, session, prompt: prompt_tokens, known: prompt_tokens });
    } else if (line.elapsed !== undefined) {
      this.turn = { to: at + line.elapsed, prefill: 0 };
    } else if (line.admit !== undefined) {
      const request = this.#request(line.admit, at);
      if (request.admitted === null) {
        this.totals.prompt += request.prompt;
        this.totals.hit += line.hit;
        request.hit = line.hit;
        request.admitted = at;
        this.history?.admit(at, request.prompt, line.hit);
        this.#span(request, 'queued', request.since, at);
      } else this.#span(request, 'preempted', request.pausedAt ?? at, at);
      Object.assign(request, { seq: line.seq, computed: line.hit, phase: 'prefill' });
      this.#sequence(line.seq).request = line.admit;
    } else if (line.resume !== undefined) {
      const request = this.#request(line.resume, at);
      if (request.admitted === null) this.#enterLoaded(at, request);
      else this.#span(request, 'preempted', request.pausedAt ?? at, at);
      request.phase = request.known > request.prompt ? 'decode' : 'prefill';
    } else if (line.chunk !== undefined) {
      const request = this.#request(line.chunk, at);
      Object.assign(request, { computed: line.first + line.tokens, chunked: true, phase: 'prefill' });
      if (this.turn) {
        this.turn.prefill += line.tokens;
        request.segments.push(['prefill', at, this.turn.to, line.tokens]);
      }
    } else if (line.preempt !== undefined) {
      const request = this.#request(line.preempt, at);
      Object.assign(request, { phase: 'paused', pausedAt: at, preemptions: request.preemptions + 1, chunked: false });
      if (!line.kept) request.seq = null;
      this.totals.preempted += 1;
    } else if (line.drop !== undefined) this.#request(line.drop, at).seq = null;
    else if (line.load !== undefined) this.#load(at, line);
    // Events, which have a number, name loads; decisions name requests.
    else if (line.loaded !== undefined && line.n === undefined) this.#loaded(at, line.loaded, true);
    else if (line.not_loaded !== undefined) this.#loaded(at, line.not_loaded, false);
    else if (line.miss !== undefined) {
      bump(this.misses, line.reason);
      const request = this.requests.get(line.miss);
      if (request) this.requests.set(line.miss, { ...request, miss: { reason: line.reason, position: line.position } });
    } else if (line.end !== undefined) this.#end(at, line);
    else if (line.cancel !== undefined) return;
    else if (line.resize) this.capacities = line.resize;
    else if (line.resized !== undefined) {
      if (line.resized) this.groups.forEach((group, g) => group.resize(this.capacities?.[g]));
    }
    else if (line.format === 'kvist-events') {
      this.tiers = tiersOf(line.config?.tiers?.list?.map(({ name }) => name));
    }
  }

  /** Blocks of a prompt are on their way from a tier. */
  #load(at, { load: id, seq, hit, tokens, runs = [] }) {
    const request = this.#request(id, at);
    this.#span(request, 'queued', request.since, at);
    // A second part is loaded behind the first one, which is not a hit.
    if (request.seq === null) request.hit = hit;
    Object.assign(request, { seq, computed: hit, phase: 'loading', since: at, loading: { hit, tokens, runs } });
    this.#sequence(seq).request = id;
  }

  /** They have arrived, or are computed. The request waits for the batch, or for its next part. */
  #loaded(at, id, ok) {
    const request = this.requests.get(id);
    // A request that was never loaded, because that would have been slower, waits as before.
    if (request?.phase !== 'loading') return;
    this.#span(request, 'loading', request.since, at);
    if (ok) {
      const parts = partsOf(request.loading);
      request.loaded = (this.tiers ?? []).map((_, tier) => (request.loaded[tier] ?? 0) + (parts[tier] ?? 0));
      parts.forEach((n, tier) => this.tiers?.[tier] && (this.tiers[tier].counted += n));
      request.computed += request.loading.tokens;
    }
    Object.assign(request, { phase: 'queued', since: at, loading: null });
  }

  /** A request that was loaded comes into the batch. */
  #enterLoaded(at, request) {
    const found = Math.max(request.hit, request.computed);
    this.totals.prompt += request.prompt;
    this.totals.hit += found;
    Object.assign(request, { hit: found, admitted: at });
    this.history?.admit(at, request.prompt, found);
    this.#span(request, 'queued', request.since, at);
  }

  /** The tier, counted from 1, from which the `i`-th block of a request's sequence is being loaded; 0 if that is unknown. */
  #source(request, g, i) {
    const from = i * this.groups[g].blockTokens;
    const run = request?.loading?.runs.find(({ until }) => until > from);
    return run?.tier === undefined || run.tier === null ? 0 : run.tier + 1;
  }

  /** Replaces what is known of the tiers with the server's figures. */
  tellTiers({ tiers, load_bytes, store_bytes }) {
    const before = this.tiers ?? [];
    this.tiers = tiersOf(tiers.map(({ name }) => name)).map((tier, i) => ({ ...tier, counted: before[i]?.counted ?? 0, told: tiers[i] }));
    this.tierBytes = { load: load_bytes, store: store_bytes };
  }

  /** Replaces what is known of the blocks that tiers have, too. */
  tellBelow({ group, runs }) {
    this.belowGroup = group;
    this.groups[group]?.tellBelow(runs);
  }

  #end(at, { end, how, generated }) {
    const request = this.requests.get(end);
    if (!request) return;
    this.live.delete(end);
    if (generated > 0 && request.first === null) {
      request.first = at;
      this.history?.firstToken(at, at - request.arrival);
    }
    if (request.phase === 'paused') this.#span(request, 'preempted', request.pausedAt, at);
    else if (request.phase === 'queued' || request.phase === 'loading') this.#span(request, request.phase, request.since, at);
    Object.assign(request, { loading: null, phase: 'ended', ended: at, how, generated, known: request.prompt + generated });
    this.#rest(request);
    this.history?.end(at, request);
  }

  /** Applies the end of a step. */
  #done(at, outcome) {
    const turn = this.turn;
    this.turn = null;
    const drafts = verified(outcome);
    let decode = 0;
    for (const id of this.live) {
      const request = this.requests.get(id);
      if (outcome.failed || (request.phase !== 'prefill' && request.phase !== 'decode')) continue;
      const last = request.known - request.computed <= 1;
      if (request.chunked ? request.computed < request.known : !last) {
        request.chunked = false;
        continue;
      }
      const draft = drafts.get(id);
      const made = draft?.emitted ?? outcome.steps ?? 1;
      if (!request.chunked) {
        request.computed += made;
        decode += made;
        request.passes += outcome.steps ?? 1;
        request.made += made;
        if (draft) request.draft = { at, ...draft };
        this.#span(request, 'decode', outcome.at, at);
      }
      request.chunked = false;
      request.known += made;
      request.generated = request.known - request.prompt;
      request.phase = 'decode';
      if (request.first === null) {
        request.first = at;
        this.history?.firstToken(at, at - request.arrival);
      }
    }
    this.history?.turn(outcome.at, at, turn?.prefill ?? 0, decode, this.groups[this.mainGroup]);
  }

  #blocks({ at, blocks }) {
    for (const [g, change, block, seq, reason, from] of blocks) {
      const group = this.groups[g];
      if (!group) continue;
      bump(this.changes, `${change}/${reason}`);
      this.history?.block(at, g, change, block, seq, reason, from);
      this.onchange?.(g, block, isEviction(change, reason) ? 'evict' : change);
      const sequence = seq === null ? null : this.#sequence(seq);
      const table = sequence?.tables[g];
      switch (change) {
        case 'alloc':
          if (reason === 'load') {
            const request = this.requests.get(sequence.request);
            group.take(block, seq, at, true, this.#source(request, g, table.length));
          } else group.take(block, seq, at);
          table.push(block);
          break;
        case 'hit':
          group.hold(block, seq, at);
          table.push(block);
          break;
        case 'share':
          if (reason !== 'duplicate') {
            if (table.length === 0) sequence.parent = group.holders[block]?.at(-1) ?? null;
            table.push(block);
          } else sequence.doubled[g] = block;
          group.hold(block, seq, at);
          break;
        case 'copy_on_write': {
          group.take(block, seq, at);
          const i = table.lastIndexOf(from);
          if (i >= 0) table[i] = block;
          else table.push(block);
          break;
        }
        case 'store':
          group.store(block);
          break;
        case 'free':
        case 'idle':
        case 'release': {
          group.release(block, seq, { free: FREE, idle: IDLE, release: HELD }[change], at);
          if (isEviction(change, reason)) this.#evicted(g, block);
          if (!table) break;
          const i = table.lastIndexOf(block);
          if (i < 0) break;
          if (reason === 'window') table[i] = null;
          else if (reason === 'duplicate') table[i] = sequence.doubled[g] ?? block;
          else table.splice(i, 1);
          break;
        }
        case 'move':
          group.move(from, block);
          this.#rename(g, from, block);
          break;
        case 'evict':
          group.release(block, null, FREE, at);
          this.#evicted(g, block);
          break;
      }
    }
    this.#forget();
  }

  #evicted(g, block) {
    this.totals.evicted += 1;
    this.groups[g].stored[block] = 0;
    this.#lose(g, block);
  }

  /** Block `from` is called `to` now, wherever it is named. */
  #rename(g, from, to) {
    const rename = (tables) => {
      const i = tables[g]?.indexOf(from) ?? -1;
      if (i >= 0) tables[g][i] = to;
    };
    for (const { tables } of this.sequences.values()) rename(tables);
    this.sessions?.forEach(({ tables }) => rename(tables));
    if (this.resting?.[g]?.delete(from)) this.resting[g].add(to);
  }

  /** Replaces the list of sessions with the server's. */
  tellSessions({ sessions, more }) {
    this.sessions = sessions;
    this.moreSessions = more;
    // Lets `#lose` find quickly whether an evicted block belongs to a session.
    this.resting = this.groups.map((_, g) => new Set(sessions.flatMap(({ tables }) => tables[g] ?? [])));
  }

  /** A session's request has ended: the session's blocks are the computed ones. The server confirms this a moment later. */
  #rest(request) {
    const session = this.sessions?.find(({ id }) => id === request.session);
    const sequence = this.sequences.get(request.seq);
    if (!session || !sequence) return;
    session.running = false;
    session.tables = sequence.tables.map((table, g) => {
      const blocks = table.slice(0, Math.max(0, Math.floor((request.known - 1) / this.groups[g].blockTokens)));
      blocks.forEach((block) => this.resting[g].add(block));
      return blocks;
    });
  }

  /** A block is gone: cuts the sessions' tables before it. The server confirms this a moment later. */
  #lose(g, block) {
    if (!this.resting[g]?.has(block)) return;
    for (const { tables } of this.sessions) {
      const i = tables[g]?.indexOf(block) ?? -1;
      if (i >= 0) tables[g].length = i;
    }
  }

  /** Removes sequences that use no blocks any more. */
  #forget() {
    for (const [seq, sequence] of this.sequences) {
      const request = sequence.request === null ? null : this.requests.get(sequence.request);
      const over = sequence.request !== null && (!request || request.phase === 'ended' || request.seq !== seq);
      const empty = sequence.tables.every((table) => table.every((block) => block === null));
      if (empty && (over || sequence.request === null)) this.sequences.delete(seq);
    }
  }

  /** Drops old entries, so that a live view does not grow without bound. */
  prune() {
    let surplus = this.requests.size - KEPT_REQUESTS;
    for (const [id, request] of this.requests) {
      if (surplus <= 0) break;
      if (request.phase !== 'ended') continue;
      this.requests.delete(id);
      surplus -= 1;
    }
    this.history?.prune();
  }

  /** The position of the first token of `block` in `sequence`, or null. */
  position(g, sequence, block) {
    const table = sequence.tables[g];
    const i = table.lastIndexOf(block);
    if (i < 0) return null;
    const request = sequence.request === null ? null : this.requests.get(sequence.request);
    const behind = this.groups[g].window !== null && request
      ? Math.max(0, Math.ceil(request.computed / this.groups[g].blockTokens) - table.length)
      : 0;
    return (i + behind) * this.groups[g].blockTokens;
  }
}
