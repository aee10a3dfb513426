// The reducer without a browser: lines as a server writes them, and what they make of requests, blocks and charts.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';
import { drafted, layout as tree, verified } from '../src/lib/drafts.js';
import { Flashes } from '../src/lib/flashes.js';
import { History, countUntil } from '../src/lib/history.js';
import { Model, order, partsOf, sourcesOf } from '../src/lib/model.js';
import { contrast, oklch, palette } from '../src/lib/palette.js';
import { Recording } from '../src/lib/recording.js';
import { decodeRate, series } from '../src/lib/series.js';
import { forest, layout } from '../src/lib/sharing.js';
import { Slots } from '../src/lib/slots.js';
import { Throttle } from '../src/lib/throttle.js';

const GROUPS = [{ block_tokens: 16, blocks: 64, window: null }];
const MS = 1e6;

/** Lines of one request on a server: steps of `step` ns, and `gap` ns of other work between two of them. */
function served({ id = 0, begin = 0, tokens = 5, step = 10 * MS, gap = 1 * MS, hit = 0 }) {
  let at = begin;
  const lines = [{ n: 0, at, arrive: { id, arrival_ns: at, prompt_tokens: 20, max_new: tokens } }];
  for (let i = 0; i < tokens; i++) {
    at += gap;
    lines.push({ n: i + 1, at, steps: 1, elapsed: step, sampled: [null], finished: i === tokens - 1 ? [0] : [] });
    if (i === 0) {
      lines.push({ step: i, at, admit: id, seq: id, hit }, { step: i, at, chunk: id, first: hit, tokens: 20 - hit });
      lines.push({ step: i, at, blocks: [[0, 'alloc', 2 * id, id, 'append'], [0, 'alloc', 2 * id + 1, id, 'append']] });
    }
    at += step;
    if (i === tokens - 1) {
      lines.push({ step: i, at, end: id, how: 'stop', generated: tokens });
      lines.push({ step: i, at, blocks: [[0, 'idle', 2 * id, id, 'remove'], [0, 'free', 2 * id + 1, id, 'remove']] });
    }
  }
  return lines;
}
function reduced(lines, model = new Model(GROUPS)) {
  model.history ??= new History();
  for (const line of order(lines)) model.apply(line);
  return model;
}
const kinds = (request) => request.segments.map(([kind]) => kind);
const text = (lines) => [{ format: 'kvist-recording', version: 1, groups: GROUPS }, ...lines].map((line) => JSON.stringify(line)).join('\n');

test('an answer is one segment, however long a server does other things between two steps', () => {
  const request = reduced(served({ tokens: 500 })).requests.get(0);
  assert.deepEqual(kinds(request), ['queued', 'prefill', 'decode']);
  assert.deepEqual(request.segments.at(-1), ['decode', 12 * MS, 500 * 11 * MS]);
});

test('a preemption lies between two segments of an answer', () => {
  const lines = served({ tokens: 4 }).filter((line) => line.n !== 3);
  const at = 22 * MS;
  lines.splice(-4, 0, { step: 2, at: at + 1, preempt: 0, for: 'room', kept: true }, { step: 2, at: at + 5 * MS, resume: 0 });
  assert.deepEqual(kinds(reduced(lines).requests.get(0)), ['queued', 'prefill', 'decode', 'preempted', 'decode']);
});

test('a smaller cache moves blocks, and what names them follows', () => {
  const model = reduced(served({ id: 0, tokens: 3 }).slice(0, -2));
  assert.deepEqual([model.groups[0].shown, model.groups[0].held], [64, 2]);
  for (const line of [
    { n: 90, at: 100 * MS, resize: [24] },
    { n: 91, at: 100 * MS, resized: true },
    { step: 9, at: 100 * MS, blocks: [[0, 'move', 5, null, 'resize', 0]] },
  ]) model.apply(line);
  const [group] = model.groups;
  assert.deepEqual([group.bound, group.held, group.state[0], group.state[5]], [1, 2, 0, 1]);
  assert.deepEqual(model.sequences.get(0).tables[0], [5, 1]);
  assert.deepEqual([group.holders[0], group.holders[5]], [undefined, [0]]);
  // A capacity that was refused changes nothing.
  model.apply({ n: 92, at: 101 * MS, resize: [640] });
  model.apply({ n: 93, at: 101 * MS, resized: false });
  assert.equal(group.bound, 1);
});

test('a block is arriving until its content is stored, or given up', () => {
  const model = reduced([
    { step: 0, at: 1, blocks: [[0, 'alloc', 0, 7, 'load'], [0, 'alloc', 1, 7, 'load'], [0, 'alloc', 2, 7, 'append']] },
  ]);
  const arriving = () => [0, 1, 2].map((block) => model.groups[0].arriving[block]);
  assert.deepEqual(arriving(), [1, 1, 0]);
  const kept = model.groups[0].clone();
  reduced([{ step: 1, at: 2, blocks: [[0, 'store', 0, 7, 'store'], [0, 'free', 1, 7, 'load']] }], model);
  assert.deepEqual(arriving(), [0, 0, 0]);
  assert.equal(model.groups[0].held, 2);
  assert.equal(kept.arriving[0], 1, 'a keyframe has columns of its own');
});

test('keyframes share what has ended, and going back changes none of them', () => {
  const lines = Array.from({ length: 60 }, (_, id) => served({ id: id % 16 + 16 * Math.floor(id / 16), begin: id * 100 * MS, tokens: 6 })).flat();
  const recording = new Recording(text(lines), 'many');
  const [a, b] = recording.keyframes.slice(-2).map((frame) => frame.model.requests.get(0));
  assert.equal(a.phase, 'ended');
  assert.equal(a, b);
  const state = () => JSON.stringify([[...recording.now.requests.values()], [...recording.now.sequences.values()], recording.now.groups[0].held]);
  const moments = [0.1, 0.37, 0.5, 0.83, 1].map((share) => recording.begin + (recording.end - recording.begin) * share);
  // A naive model applies everything from the beginning on.
  const told = moments.map((at) => {
    const model = new Model(GROUPS);
    for (const line of recording.lines) if ((line.at ?? 0) <= at) model.apply(line);
    return JSON.stringify([[...model.requests.values()], [...model.sequences.values()], model.groups[0].held]);
  });
  for (const i of [4, 0, 3, 1, 2, 0, 4, 2, 1, 3]) {
    recording.seek(moments[i]);
    assert.equal(state(), told[i], `at ${moments[i]}`);
  }
});

test('a first token is counted once, be it the last too or not', () => {
  for (const tokens of [1, 2, 7]) {
    assert.deepEqual(reduced(served({ tokens })).history.firsts, [[11 * MS, 11 * MS]], `${tokens} tokens`);
  }
  // A request of which only the end is told.
  const model = reduced([{ at: 0, arrive: { id: 1, arrival_ns: 0, prompt_tokens: 3, max_new: 1 } }, { at: 5 * MS, end: 1, how: 'stop', generated: 1 }]);
  assert.deepEqual(model.history.firsts, [[5 * MS, 5 * MS]]);
});

test('of a block that a snapshot tells of, nothing is said that is not known', () => {
  const sequences = [{ seq: 4, tables: [[7, 2]] }, { seq: 5, tables: [[7]] }];
  const model = Model.ofSnapshot({ at: 90 * MS, groups: GROUPS, requests: [], sequences, idle: [[9]] });
  const [group] = model.groups;
  assert.deepEqual([group.held, group.idle, group.refs(7), group.owner[7], group.owner[9]], [2, 1, 2, 4, -1]);
  for (const block of [7, 2, 9]) {
    assert.deepEqual([group.touched[block], group.born[block], group.heat(block, 100 * MS)], [-Infinity, -Infinity, 0], `block ${block}`);
  }
  model.apply({ at: 100 * MS, blocks: [[0, 'hit', 9, 6, 'open'], [0, 'release', 7, 4, 'remove']] });
  assert.deepEqual([group.held, group.idle, group.refs(9), group.refs(7), group.owner[7]], [3, 0, 1, 1, 5]);
  assert.equal(group.touched[9], 100 * MS);
  assert.equal(group.heat(9, 100 * MS), 1);
});

test('a block that is known twice leaves nothing behind but the one that stays', () => {
  const model = new Model(GROUPS);
  const events = [[0, 'alloc', 0, 0, 'append'], [0, 'alloc', 1, 1, 'append'], [0, 'store', 0, 0, 'full'], [0, 'share', 0, 1, 'duplicate'], [0, 'free', 1, 1, 'duplicate']];
  for (const blocks of [events.slice(0, 4), events.slice(4)]) model.apply({ at: 1, blocks });
  assert.deepEqual(model.sequences.get(1).tables, [[0]]);
  model.apply({ at: 2, blocks: [[0, 'release', 0, 1, 'remove'], [0, 'idle', 0, 0, 'remove']] });
  assert.equal(model.sequences.size, 0);
  assert.ok(!Object.values(model).some((value) => value instanceof Map && value.size > 0 && value !== model.changes));
});

test('the share that was found is that of the last twenty prompts', () => {
  const history = new History();
  const admits = Array.from({ length: 90 }, (_, i) => [i * MS, 10 + ((i * 7) % 40), (i * 13) % 10]);
  for (const admit of admits) history.admit(...admit);
  const { hit } = series(history, [0, 90 * MS], 90);
  // A chart ends where the last step does.
  history.turn(0, 90 * MS, 0, 0, { held: 0, idle: 0 });
  const told = series(history, [0, 90 * MS], 90).hit;
  assert.equal(hit.at(-1), null);
  admits.forEach((_, i) => {
    const last = admits.slice(Math.max(0, i - 19), i + 1);
    const share = last.reduce((sum, [, , found]) => sum + found, 0) / last.reduce((sum, [, prompt]) => sum + prompt, 0);
    assert.ok(Math.abs(told[i] - share) < 1e-12, `prompt ${i}: ${told[i]}, not ${share}`);
  });
});

test('what glows goes out, whether it is shown or not', () => {
  let now = 0;
  const flashes = new Flashes(() => now);
  flashes.add(1, 7, 'alloc');
  flashes.add(0, 7, 'free');
  assert.deepEqual([...flashes.of(0)], []);
  assert.deepEqual([...flashes.of(1)], [[7, 'given', 1]]);
  now = 300;
  flashes.add(1, 8, 'evict');
  flashes.add(1, 7, 'hit');
  now = 601;
  assert.deepEqual([...flashes.of(1)].map(([block, kind]) => [block, kind]), [[8, 'gone'], [7, 'found']]);
  now = 901;
  assert.equal(flashes.any, false);
});

test('what is dear runs as often as it may, and the last time is not lost', () => {
  let now = 0;
  let timer = null;
  let ran = [];
  const clock = { now: () => now, setTimeout: (run, after) => (timer = { run, at: now + after }), clearTimeout: () => (timer = null) };
  const throttle = new Throttle(250, () => ran.push(now), clock);
  for (; now <= 2000; now += 16) {
    if (timer && timer.at <= now) timer.run();
    if (now < 1000) throttle.ask();
  }
  // 992 was asked for, and came.
  assert.ok(ran.length >= 4 && ran.length <= 6 && ran.at(-1) >= 992, ran.join());
  ran.slice(1).forEach((at, i) => assert.ok(at - ran[i] >= 250, ran.join()));
  ran = [];
  now = 2001;
  throttle.force();
  now = 2002;
  throttle.ask();
  throttle.force();
  assert.deepEqual([ran, timer], [[2001, 2002], null]);
});

test('colours are kept for as many sequences as live, not for all there ever were', () => {
  const { sequence } = palette(false);
  const first = sequence(0);
  assert.equal(sequence(0), first);
  for (let seq = 1; seq < 70000; seq++) sequence(seq);
  assert.notEqual(sequence(0), first, 'it was made anew');
  assert.deepEqual(sequence(0), first);
});

// Of two branches that had just been answered the page said "No sequence is live", although both lay in the cache.
test('a session at rest is drawn with the blocks that it would find', () => {
  const sessions = [
    { id: 'sess-a', parent: null, tokens: 40, running: false, tables: [[3, 4]] },
    { id: 'sess-b', parent: 'sess-a', tokens: 60, running: false, tables: [[3, 4, 7]] },
  ];
  const model = Model.ofSnapshot({ groups: GROUPS, at: 0, requests: [], sequences: [], idle: [[3, 4, 7]] });
  const shown = (rank) => {
    const trees = forest(model, 0, rank);
    return { rows: layout(trees).rows.map(({ seq, end }) => [seq, end]), saved: trees.named - trees.held, live: trees.live, resting: trees.resting };
  };
  model.tellSessions({ sessions, more: 0 });
  assert.deepEqual(shown(), { rows: [['sess-b', 3], ['sess-a', 2]], saved: 2, live: 0, resting: 2 });

  // One that runs is its sequence, in its place, and nothing else.
  const run = [
    { n: 0, at: 1, arrive: { id: 9, arrival_ns: 1, prompt_tokens: 40, max_new: 9, name: 'cmpl-1', session: 'sess-a' } },
    { n: 1, at: 2, steps: 1, elapsed: 5, sampled: 1, finished: [] },
    { step: 1, at: 2, admit: 9, seq: 5, hit: 32 },
    { step: 1, at: 2, blocks: [[0, 'hit', 3, 5, 'open'], [0, 'hit', 4, 5, 'open'], [0, 'alloc', 8, 5, 'append']] },
  ];
  reduced(run, model);
  assert.equal(model.requests.get(9).name, 'cmpl-1');
  assert.deepEqual(shown(), { rows: [[5, 3], ['sess-b', 3]], saved: 2, live: 1, resting: 1 });

  // It rests again before the server has said so: whole blocks behind all tokens but the last one.
  const end = [
    { step: 2, at: 9, end: 9, how: 'length', generated: 9 },
    { step: 2, at: 9, blocks: [[0, 'store', 8, 5, 'append'], [0, 'idle', 3, 5, 'remove'], [0, 'idle', 4, 5, 'remove'], [0, 'idle', 8, 5, 'remove']] },
  ];
  reduced(end, model);
  assert.deepEqual(shown(), { rows: [['sess-a', 3], ['sess-b', 3]], saved: 2, live: 0, resting: 2 });
  assert.deepEqual(shown((id) => ({ 'sess-b': 0, 'sess-a': 1 })[id]).rows.map(([id]) => id), ['sess-b', 'sess-a']);

  // What is evicted is found no more, nor what lies behind it.
  reduced([{ step: 3, at: 20, blocks: [[0, 'evict', 4, null, 'make_room']] }], model);
  assert.deepEqual(shown(), { rows: [['sess-a', 1], ['sess-b', 1]], saved: 1, live: 0, resting: 2 });
});

// On a dark ground, lanes that waited and free blocks could hardly be seen.
test('what waits and what is free stand off the ground', () => {
  for (const dark of [false, true]) {
    const { surface, line, phases } = palette(dark);
    for (const [name, colour] of Object.entries({ free: line, ...phases })) {
      assert.ok(contrast(colour, surface) >= 3, `${name} in ${dark ? 'dark' : 'light'}: ${contrast(colour, surface)}`);
    }
  }
  assert.equal(contrast([0, 0, 0], [255, 255, 255]), 21);
});

test('text can be read on every ground', () => {
  const sheet = readFileSync(new URL('../src/app.css', import.meta.url), 'utf8');
  const colour = (name, dark) => {
    const number = '([\\d.]+)';
    const one = `oklch\\(${number} ${number} ${number}\\)`;
    const parts = new RegExp(`--${name}: light-dark\\(${one}, ${one}\\)`).exec(sheet).slice(1).map(Number);
    return oklch(...parts.slice(dark ? 3 : 0, dark ? 6 : 3));
  };
  for (const dark of [false, true]) {
    for (const ground of ['card', 'bg', 'sunk', 'wash']) {
      for (const text of ['ink', 'quiet', 'accent', 'alarm']) {
        const found = contrast(colour(text, dark), colour(ground, dark));
        assert.ok(found >= 4.5, `${text} on ${ground} in ${dark ? 'dark' : 'light'}: ${found}`);
      }
    }
    // The text of the canvases is that of the page.
    assert.deepEqual(palette(dark).quiet, colour('quiet', dark));
    assert.ok(contrast(palette(dark).quiet, palette(dark).surface) >= 4.5);
  }
});

test('where no step has run, charts have no point', () => {
  const { x, ...lines } = series(new History(), [0, 1e9]);
  for (const [name, values] of Object.entries(lines)) assert.ok(values.every((value) => value === null), name);
});

/** A request of 20 prompt tokens, and steps that verify drafts: `[parents, advance]`, or a step without. */
function speculated(steps) {
  const lines = [{ n: 0, at: 0, arrive: { id: 4, arrival_ns: 0, prompt_tokens: 20, max_new: 50 } }];
  const step = (at, more) => lines.push({ n: lines.length, at, steps: 1, elapsed: MS, ...more });
  step(MS, { sampled: 1, finished: [] });
  lines.push({ step: 0, at: MS, admit: 4, seq: 2, hit: 0 }, { step: 0, at: MS, chunk: 4, first: 0, tokens: 20 });
  steps.forEach((parts, i) => {
    const [parents, advance] = parts ?? [];
    const more = parents ? { drafts: [[0, 4, parents]], ...(advance && { advances: [advance] }) } : {};
    step((i + 2) * 2 * MS, advance ? more : { ...more, sampled: 1, finished: [] });
  });
  return lines;
}

test('a step gives as many tokens as its draft says, and one without a draft', () => {
  const model = reduced(speculated([
    [[null, null, 0], { path: [0, 1, 3], emitted: 3 }],
    null,
    [[null, 0, 1], { kept: 1, emitted: 1 }],
    [[null, 0], null],
    [[null, 0, 1], { kept: 3, emitted: 3 }],
  ]));
  const request = model.requests.get(4);
  assert.deepEqual([request.generated, request.known, request.computed], [10, 30, 29]);
  assert.deepEqual([request.passes, request.made], [5, 9]);
  assert.deepEqual(request.draft, { at: 13 * MS, parents: [null, 0, 1], path: [0, 1], emitted: 3 });
  assert.deepEqual(model.history.turns.map((turn) => turn.decode), [0, 3, 1, 1, 1, 3]);
});

test('accepted nodes are numbered as the parents are', () => {
  const path = (advance) => verified({ drafts: [[1, 9, [null, null, 1]]], advances: [{ emitted: 1 }, advance] }).get(9).path;
  assert.deepEqual(path({ path: [0, 2, 3], emitted: 3 }), [1, 2]);
  assert.deepEqual(path({ path: [0], emitted: 1 }), []);
  assert.deepEqual(path({ kept: 2, emitted: 2 }), [0]);
  assert.equal(verified({ drafts: [[0, 9, [null]]], sampled: 1 }).size, 0, 'it did not fit into the cache');
  assert.equal(verified({}).size, 0);
});

test('a draft is drawn by depth, and every leaf has a row of its own', () => {
  const { nodes, columns, rows } = tree([null, 0, null, 0, 1]);
  assert.deepEqual([columns, rows], [3, 3]);
  assert.deepEqual(nodes.map(({ depth, row }) => [depth, row]), [[0, 0], [1, 0], [0, 2], [1, 1], [2, 0]]);
});

test('the draft of the sequence under the pointer is shown, or of a live request', () => {
  const draft = (at) => ({ at, parents: [null], path: [], emitted: 1 });
  const requests = [{ id: 0, seq: 0, draft: draft(5) }, { id: 1, seq: 1, draft: draft(3) }, { id: 2, seq: 2, draft: draft(4) }, { id: 3, seq: 3, draft: null }];
  const shown = (live, pointed = null) => drafted({ requests: new Map(requests.map((r) => [r.id, r])), live: new Set(live) }, pointed)?.id;
  assert.equal(shown([1, 2, 3]), 1);
  assert.equal(shown([1, 2, 3], 2), 2);
  assert.equal(shown([1, 2, 3], 3), 1, 'it has no draft');
  assert.equal(shown([]), 0, 'the last one');
  assert.equal(drafted(reduced(served({})), null), null);
});

const TIERS = { list: [{ name: 'ram' }, { name: 'disk' }] };
/** Lines of a request whose blocks come from two tiers, between those of which `last` is the last one. */
function tiered(last = Infinity) {
  return [
    { format: 'kvist-events', config: { policy: 'fcfs', tiers: TIERS } },
    { n: 0, at: 0, arrive: { id: 3, arrival_ns: 0, prompt_tokens: 100, max_new: 4 } },
    { step: 0, at: 2 * MS, load: 3, seq: 7, hit: 16, tokens: 64, runs: [{ tier: 0, until: 48 }, { tier: 1, until: 80 }] },
    { step: 0, at: 2 * MS, blocks: [[0, 'hit', 9, 7, 'open'], ...[0, 1, 2, 3].map((block) => [0, 'alloc', block, 7, 'load'])] },
    { n: 1, at: 9 * MS, loaded: 0, ok: true, took: 7 * MS },
    { step: 0, at: 9 * MS, loaded: 3, tokens: 64 },
    { step: 0, at: 9 * MS, blocks: [0, 1, 2, 3].map((block) => [0, 'store', block, 7, 'load']) },
    { n: 2, at: 10 * MS, steps: 1, elapsed: 5 * MS, sampled: [null], finished: [] },
    { step: 0, at: 10 * MS, resume: 3 },
    { step: 0, at: 10 * MS, chunk: 3, first: 80, tokens: 20 },
    { step: 0, at: 10 * MS, blocks: [[0, 'alloc', 4, 7, 'append'], [0, 'alloc', 5, 7, 'append']] },
    { step: 1, at: 15 * MS, end: 3, how: 'stop', generated: 1 },
    { step: 1, at: 15 * MS, blocks: [[0, 'idle', 9, 7, 'remove'], ...[0, 1, 2, 3, 4].map((block) => [0, 'idle', block, 7, 'remove']), [0, 'free', 5, 7, 'remove']] },
  ].slice(0, last);
}
const sources = (model) => Array.from({ length: 10 }, (_, block) => model.groups[0].tier[block]);

test('a request is loading until its blocks are there, and its blocks tell where they came from', () => {
  const loading = reduced(tiered(4));
  const request = loading.requests.get(3);
  assert.equal(request.phase, 'loading');
  assert.equal(sourcesOf(loading.tiers, partsOf(request.loading)), '32 from ram, 32 from disk');
  assert.deepEqual(kinds(request), ['queued']);
  assert.deepEqual(sources(loading), [1, 1, 2, 2, 0, 0, 0, 0, 0, 0]);
  assert.deepEqual([...loading.groups[0].arriving.slice(0, 5)], [1, 1, 1, 1, 0]);
  assert.deepEqual([loading.totals.prompt, loading.totals.hit], [0, 0], 'it is not admitted');

  const waiting = reduced(tiered(7)).requests.get(3);
  assert.equal(waiting.phase, 'queued');
  assert.deepEqual(waiting.segments, [['queued', 0, 2 * MS], ['loading', 2 * MS, 9 * MS]]);

  const model = reduced(tiered());
  const ended = model.requests.get(3);
  assert.deepEqual(kinds(ended), ['queued', 'loading', 'queued', 'prefill']);
  assert.deepEqual([ended.hit, ended.loaded, ended.admitted, ended.first], [80, [32, 32], 10 * MS, 15 * MS]);
  assert.deepEqual([model.totals.prompt, model.totals.hit], [100, 80]);
  assert.deepEqual(model.tiers.map(({ name, counted }) => [name, counted]), [['ram', 32], ['disk', 32]]);
  // They are marked as long as they are cached, also for others that find them.
  assert.deepEqual([model.groups[0].from(1), model.groups[0].from(2)], [2, 2]);
  model.apply({ at: 20 * MS, blocks: [[0, 'hit', 0, 8, 'open'], [0, 'evict', 2, null, 'make_room'], [0, 'evict', 3, null, 'make_room'], [0, 'alloc', 3, 8, 'append']] });
  assert.deepEqual(sources(model), [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
});

test('a load that fails, is late or is not begun leaves nothing behind', () => {
  for (const why of ['failed', 'late']) {
    const model = reduced([...tiered(4), { step: 0, at: 9 * MS, not_loaded: 3, why }]);
    const request = model.requests.get(3);
    assert.deepEqual([request.phase, request.loading, request.loaded, request.computed], ['queued', null, [], 16]);
    model.apply({ step: 0, at: 10 * MS, blocks: [0, 1, 2, 3].map((block) => [0, 'free', block, 7, 'load']) });
    assert.deepEqual(sources(model), Array(10).fill(0));
    model.apply({ step: 0, at: 10 * MS, resume: 3 });
    assert.deepEqual([request.hit, model.totals.hit], [16, 16]);
    assert.equal(model.tiers[0].counted, 0);
  }
  const model = reduced([...tiered(2), { step: 0, at: 9 * MS, not_loaded: 3, why: 'slower' }, { step: 0, at: 10 * MS, admit: 3, seq: 1, hit: 0 }]);
  assert.deepEqual(kinds(model.requests.get(3)), ['queued']);
  const gone = reduced([...tiered(4), { step: 0, at: 9 * MS, end: 3, how: 'cancelled', generated: 0 }]);
  assert.deepEqual(kinds(gone.requests.get(3)), ['queued', 'loading']);
});

test('a prompt that is loaded in parts is one request', () => {
  const first = { step: 0, at: 2 * MS, load: 3, seq: 7, hit: 16, tokens: 32, runs: [{ tier: 0, until: 48 }] };
  const second = { step: 0, at: 5 * MS, load: 3, seq: 7, hit: 48, tokens: 32, runs: [{ tier: 0, until: 64 }, { tier: 1, until: 80 }] };
  const done = (at) => ({ step: 0, at, loaded: 3, tokens: 32 });
  const model = reduced([...tiered(2), first, done(4 * MS), second, done(9 * MS), { step: 0, at: 9 * MS, resume: 3 }]);
  const request = model.requests.get(3);
  assert.deepEqual([request.hit, request.loaded], [80, [48, 16]]);
  assert.deepEqual(kinds(request), ['queued', 'loading', 'queued', 'loading']);
});

test('a snapshot in mid-load goes on as if it had been watched', () => {
  const snapshot = {
    at: 5 * MS, groups: GROUPS, tiers: ['ram', 'disk'], idle: [[]],
    requests: [{
      id: 3, running: false, seq: 7, arrival_ns: 0, admitted_ns: null, first_token_ns: null, prompt_tokens: 100, max_new: 4, generated: 0,
      cached: 16, hit_tokens: 16, loading: { hit: 16, tokens: 64, runs: [{ tier: 0, until: 48 }, { tier: 1, until: 80 }], blocks: [[0, 1, 2, 3]] },
    }],
    sequences: [{ seq: 7, len: 16, tables: [[9]] }],
  };
  const late = Model.ofSnapshot(snapshot);
  const early = reduced(tiered(4));
  const state = (model) => [sources(model), [...model.groups[0].arriving.slice(0, 10)], model.sequences.get(7)?.tables, model.groups[0].held, model.requests.get(3).phase];
  assert.deepEqual(state(late), state(early));
  for (const model of [late, early]) for (const line of order(tiered().slice(4))) model.apply(line);
  assert.deepEqual(state(late), state(early));
  assert.deepEqual(late.requests.get(3).loaded, [32, 32]);
  late.tellTiers({ tiers: [{ name: 'ram', bytes: 5, capacity_bytes: 9, blocks: 1, loaded_tokens: 640, errors: 2 }, { name: 'disk', bytes: null, capacity_bytes: 9, blocks: null, loaded_tokens: 32, errors: 0 }], load_bytes: 1, store_bytes: 2 });
  assert.deepEqual(late.tiers.map(({ told, counted }) => [told.loaded_tokens, counted]), [[640, 32], [32, 32]]);
  assert.deepEqual(late.clone().tiers, late.tiers);
});

test('a block is below until its content changes', () => {
  const model = Model.ofSnapshot({ at: 0, groups: GROUPS, tiers: ['ram', 'disk'], idle: [[0, 1, 2, 3]] });
  const group = model.groups[0];
  assert.equal(model.belowGroup, null);
  model.tellBelow({ group: 0, runs: [[[0, 2]], [[1, 3], [60, 2]]] });
  assert.deepEqual([model.belowGroup, [...group.below.slice(0, 4)], group.alsoIn(0), group.alsoIn(1), group.alsoIn(null)], [0, [1, 3, 2, 2], 2, 3, 0]);
  assert.ok(group.below.slice(4).every((tiers) => tiers === 0), 'what is not on the map');
  const copy = model.clone();
  model.apply({ step: 0, at: 1, blocks: [[0, 'evict', 1, null, 'capacity'], [0, 'alloc', 1, 5, 'open'], [0, 'hit', 2, 5, 'prefix']] });
  assert.deepEqual([...group.below.slice(0, 4)], [1, 0, 2, 2]);
  assert.deepEqual([...copy.groups[0].below.slice(0, 4)], [1, 3, 2, 2]);
  model.tellBelow({ group: 0, runs: [[], []] });
  assert.deepEqual([group.alsoIn(0), group.alsoIn(1), group.alsoIn(null)], [0, 0, 4]);
});

test('without tiers there is none to show', () => {
  const model = reduced([{ format: 'kvist-events', config: { policy: 'fcfs' } }, ...served({})]);
  assert.equal(model.tiers, null);
  assert.equal(Model.ofSnapshot({ groups: GROUPS }).tiers, null);
});

// With windows in its layers, Gemma 3 has them in the first group: figures and charts were those of the window.
test('figures and charts show a group without a window', () => {
  const window = { block_tokens: 16, blocks: 8, window: 64 };
  const model = new Model([window, ...GROUPS]);
  assert.equal(model.mainGroup, 1);
  assert.deepEqual([new Model(GROUPS).mainGroup, new Model([window]).mainGroup], [0, 0]);
  reduced([
    { n: 0, at: 0, arrive: { id: 0, arrival_ns: 0, prompt_tokens: 40, max_new: 9 } },
    { n: 1, at: MS, steps: 1, elapsed: 5 * MS, sampled: 1, finished: [] },
    { step: 0, at: MS, admit: 0, seq: 0, hit: 0 }, { step: 0, at: MS, chunk: 0, first: 0, tokens: 40 },
    { step: 0, at: MS, blocks: [[0, 'alloc', 0, 0, 'append'], ...[0, 1, 2].map((block) => [1, 'alloc', block, 0, 'append'])] },
  ], model);
  assert.deepEqual(model.history.turns.map(({ held }) => held), [3]);
});

// A server that copies blocks to tiers before it evicts them seemed to evict none.
test('a block that was copied to a tier first is evicted, too', () => {
  const model = Model.ofSnapshot({ at: 0, groups: GROUPS, tiers: ['ram'], idle: [[3, 4]] });
  model.tellSessions({ sessions: [{ id: 'sess-a', parent: null, tokens: 40, running: false, tables: [[3, 4]] }], more: 0 });
  const changes = [];
  model.onchange = (_, block, change) => changes.push([block, change]);
  model.apply({ step: 1, at: 5, blocks: [[0, 'free', 4, null, 'unpin'], [0, 'idle', 3, null, 'unpin']] });
  assert.deepEqual([model.totals.evicted, model.groups[0].idle, model.groups[0].state[4]], [1, 1, 0]);
  assert.deepEqual(model.sessions[0].tables, [[3]]);
  assert.deepEqual(changes, [[4, 'evict'], [3, 'idle']]);
  // What its sequence frees is not evicted.
  model.apply({ step: 2, at: 6, blocks: [[0, 'alloc', 9, 1, 'append'], [0, 'free', 9, 1, 'remove']] });
  assert.equal(model.totals.evicted, 1);
});

// With one step in two seconds, the figure went from 0 to 16 and back.
test('tokens per second are steady, however long a step takes', () => {
  const turns = (length, n, decode) => Array.from({ length: n }, (_, i) => ({ from: i * length, to: (i + 1) * length, decode }));
  const slow = turns(2000 * MS, 10, 16);
  // A live server has told of the steps that have ended.
  for (let at = 4000; at <= 20000; at += 130) {
    const told = slow.filter(({ to }) => to <= at * MS);
    assert.ok(Math.abs(decodeRate(told, at * MS) - 8) < 1e-9, `live at ${at} ms: ${decodeRate(told, at * MS)}`);
    assert.ok(Math.abs(decodeRate(slow, at * MS) - 8) < 1e-9, `recorded at ${at} ms: ${decodeRate(slow, at * MS)}`);
  }
  assert.ok(Math.abs(decodeRate(turns(10 * MS, 300, 4), 3050 * MS) - 400) < 1e-9);
  assert.deepEqual([decodeRate([], 5), decodeRate(slow, 60000 * MS)], [0, 0]);
});

test('events are counted up to a moment', () => {
  const items = [1, 3, 3, 7].map((at) => [at]);
  assert.deepEqual([0, 1, 3, 5, 9].map((at) => countUntil(items, at, ([at]) => at)), [0, 1, 3, 3, 4]);
});

test('a recording without layer groups is refused in words', () => {
  const line = JSON.stringify({ format: 'kvist-recording', version: 1 });
  assert.throws(() => new Recording(line, 'old.jsonl'), /old\.jsonl does not tell the layer groups/);
});

test('a place is given to the first that waits, and to none that has given up', async () => {
  const slots = new Slots(2);
  const entered = [];
  const stoppers = Array.from({ length: 5 }, () => new AbortController());
  const all = stoppers.map(({ signal }, i) => slots.enter(signal).then(() => entered.push(i)));
  await Promise.all(all.slice(0, 2));
  assert.deepEqual([entered, slots.free], [[0, 1], false]);
  stoppers[2].abort();
  await assert.rejects(all[2], { name: 'AbortError' });
  slots.leave();
  await all[3];
  slots.leave();
  await all[4];
  assert.deepEqual(entered, [0, 1, 3, 4]);
  slots.leave();
  slots.leave();
  assert.ok(slots.free);
  await assert.rejects(slots.enter(stoppers[2].signal), { name: 'AbortError' });
});
