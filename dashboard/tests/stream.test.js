// The listener of the live stream, against answers of a server that are made up: `fetch` is replaced.
import assert from 'node:assert/strict';
import { afterEach, test } from 'node:test';
import { Live } from '../src/lib/live.js';

const MS = 1e6;
const real = globalThis.fetch;
let live;
afterEach(() => {
  live?.stop();
  globalThis.fetch = real;
});

const GROUPS = [{ block_tokens: 16, blocks: 64, window: null }];
const snapshot = (at, more = {}) => ['snapshot', JSON.stringify({ model: 'm', at, groups: GROUPS, requests: [], sequences: [], idle: [[]], ...more })];
const step = (at) => ['lines', JSON.stringify({ n: 0, at, steps: 1, elapsed: 10 * MS, sampled: [], finished: [] })];
const stream = (...events) => () =>
  new Response(events.map(([event, data]) => `event: ${event}\ndata: ${data}\n\n`).join(''), { headers: { 'content-type': 'text/event-stream' } });
const refusal = (status, message) => () => Response.json({ error: { message, type: 'x' } }, { status });
/** Stays open after its events. */
const open = (...events) => () =>
  new Response(new ReadableStream({ start: (to) => events.forEach(([event, data]) => to.enqueue(new TextEncoder().encode(`event: ${event}\ndata: ${data}\n\n`))) }), { headers: { 'content-type': 'text/event-stream' } });

/** What a listener hears of `answers`, one after the other, up to the state `until` of the last of them. */
async function heard(answers, until) {
  const told = [];
  const left = [...answers];
  globalThis.fetch = async () => left.shift()();
  await new Promise((resolve) => {
    live = new Live({
      key: () => '',
      changed: () => {},
      begun: () => told.push('begun'),
      state: (state, says) => {
        told.push(says === undefined ? state : `${state}: ${says}`);
        if (left.length === 0 && state === until) resolve();
      },
      onchange: null,
    });
  });
  return told;
}

test('a server without a place is asked again; one without a stream is not', async () => {
  const told = await heard([refusal(429, '16 dashboards are connected already'), () => new Response('', { status: 503 }), open(snapshot(5))], 'live');
  assert.deepEqual(told, ['refused: 16 dashboards are connected already', 'refused: status 503', 'live']);
  assert.deepEqual(await heard([refusal(404, 'there is no such thing')], 'absent'), ['absent']);
  assert.deepEqual(await heard([() => new Response('<html>', { headers: { 'content-type': 'text/html' } })], 'absent'), ['absent']);
  assert.deepEqual(await heard([refusal(401, 'no API key')], 'denied'), ['denied']);
  // A key that is known, and not an admin's, was told that it is wrong.
  assert.deepEqual(await heard([refusal(403, 'needs an admin key')], 'limited'), ['limited']);
});

test('a connection that fails is tried again', async () => {
  const fails = () => {
    throw new TypeError('Failed to fetch');
  };
  assert.deepEqual(await heard([fails, open(snapshot(5))], 'live'), ['refused: no answer', 'live']);
});

test('the same server heard again goes on, another begins', async () => {
  const arrive = ['lines', JSON.stringify({ n: 0, at: 1000 * MS, arrive: { id: 3, arrival_ns: 1000 * MS, prompt_tokens: 8, max_new: 1 } })];
  const admit = ['lines', JSON.stringify({ step: 0, at: 1000 * MS, admit: 3, seq: 0, hit: 4 })];
  const miss = ['lines', JSON.stringify({ at: 1000 * MS, miss: 3, reason: 'diverged', position: 4 })];
  const end = ['lines', JSON.stringify({ step: 0, at: 1001 * MS, end: 3, how: 'stop', generated: 1 })];
  const first = stream(snapshot(900 * MS), arrive, admit, miss, step(1000 * MS), end);
  assert.deepEqual(await heard([first, open(snapshot(2000 * MS))], 'live'), ['live', 'lost', 'live']);
  const { model } = live;
  assert.deepEqual([model.history.turns.length, model.totals.hit, model.misses.get('diverged'), model.requests.get(3)?.phase], [1, 4, 1, 'ended']);

  // Its clock is behind: what was drawn over the old one would hide all that comes.
  const again = stream(snapshot(20 * MS), step(30 * MS));
  assert.deepEqual(await heard([first, again, open(snapshot(50 * MS))], 'live'), ['live', 'lost', 'begun', 'live', 'lost', 'live']);
  assert.deepEqual(live.model.history.turns.map((turn) => turn.from), [30 * MS]);
  assert.equal(live.model.totals.hit, 0);
  assert.deepEqual(await heard([first, open(snapshot(2000 * MS, { model: 'other' }))], 'live'), ['live', 'lost', 'begun', 'live']);
});
