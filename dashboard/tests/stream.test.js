// The listener of the live stream, against answers of a server that are made up: `fetch` is replaced.
import assert from 'node:assert/strict';
import { afterEach, test } from 'node:test';
import { Live } from '../src/lib/live.js';
import { eventsOf } from '../src/lib/stream.js';

const MS = 1e6;
const real = globalThis.fetch;
let live;
afterEach(() => {
  live?.stop();
  globalThis.fetch = real;
});

const GROUPS = [{ block_tokens: 16, blocks: 64, window: null }];
const snapshot = (at, more = {}) => ['snapshot', JSON.stringify({ version: 1, instance_id: 'first', model: 'm', at, groups: GROUPS, requests: [], sequences: [], idle: [[]], ...more })];
const step = (at) => ['lines', JSON.stringify({ n: 0, at, steps: 1, elapsed: 10 * MS, sampled: [], finished: [] })];
const stream = (...events) => () =>
  new Response(events.map(([event, data]) => `event: ${event}\ndata: ${data}\n\n`).join(''), { headers: { 'content-type': 'text/event-stream' } });
const refusal = (status, message) => () => Response.json({ error: { message, type: 'x' } }, { status });
/** Stays open after its events. */
const open = (...events) => () =>
  new Response(new ReadableStream({ start: (to) => events.forEach(([event, data]) => to.enqueue(new TextEncoder().encode(`event: ${event}\ndata: ${data}\n\n`))) }), { headers: { 'content-type': 'text/event-stream' } });

/** A clock that a test moves on: `pass(ms)` runs the timers of that time. */
function stoppedClock() {
  const timers = new Map();
  let [now, next] = [0, 0];
  return {
    now: () => now,
    setTimeout: (run, ms) => (timers.set(next, { run, at: now + ms }), next++),
    clearTimeout: (id) => timers.delete(id),
    pass(ms) {
      now += ms;
      for (const [id, { run, at }] of timers) {
        if (at > now) continue;
        timers.delete(id);
        run();
      }
    },
  };
}
/** What a listener hears of `answers`, one after the other, up to the state `until` of the last of them. */
async function heard(answers, until, clock = stoppedClock()) {
  live?.stop();
  const told = [];
  const left = [...answers];
  await new Promise((resolve, reject) => {
    globalThis.fetch = async () => {
      if (left.length > 0) return left.shift()();
      // Without this, a listener that never says `until` would ask for ever.
      reject(new Error(`asked once more, after ${told.join('; ')}`));
      live.stop();
      throw new Error('stopped');
    };
    live = new Live({
      key: () => '',
      clock,
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

  // A restarted server's clock may be ahead of the old one: its name tells. What was drawn over the old one would hide all that comes.
  const restarted = { instance_id: 'second' };
  const again = stream(snapshot(2000 * MS, restarted), step(3000 * MS));
  assert.deepEqual(await heard([first, again, open(snapshot(4000 * MS, restarted))], 'live'), ['live', 'lost', 'begun', 'live', 'lost', 'live']);
  assert.deepEqual(live.model.history.turns.map((turn) => turn.from), [3000 * MS]);
  assert.equal(live.model.totals.hit, 0);
});

test('a stream of another version is not read', async () => {
  const errors = console.error;
  console.error = () => {};
  try {
    const told = await heard([open(snapshot(5, { version: 2 }))], 'refused');
    assert.match(told.join(), /^refused: an event "snapshot" cannot be read: the stream is of version 2, and this page reads version 1/);
  } finally {
    console.error = errors;
  }
});

test('why a connection was lost is told, and a fault is logged', async () => {
  const logged = [];
  const errors = console.error;
  console.error = (error) => logged.push(error);
  try {
    const told = await heard([stream(snapshot(5), ['lines', '{"no JSON']), refusal(503, 'shutting down'), open(snapshot(6))], 'live');
    assert.match(told[1], /^lost: an event "lines" cannot be read: /);
    assert.deepEqual([told[0], ...told.slice(2)], ['live', 'lost: shutting down', 'live']);
    assert.equal(logged.length, 1);
    assert.ok(logged[0] instanceof SyntaxError);
  } finally {
    console.error = errors;
  }
});

test('a key that is taken back ends the listening', async () => {
  assert.deepEqual(await heard([stream(snapshot(5)), refusal(401, 'no API key')], 'denied'), ['live', 'lost', 'denied']);
  assert.deepEqual(await heard([stream(snapshot(5)), refusal(403, 'no admin')], 'limited'), ['live', 'lost', 'limited']);
});

test('a key that no header can carry says so', async () => {
  const told = await new Promise((resolve) => {
    live = new Live({ key: () => 'ключ', changed: () => {}, begun: () => {}, state: (...told) => resolve(told), onchange: null });
  });
  assert.equal(told[0], 'denied');
  assert.match(told[1], /^the API key has characters that HTTP cannot send/);
});

/** Lets everything run that waits for nothing. */
const settled = () => new Promise((resolve) => setTimeout(resolve, 20));

// A connection that had died without a word was "Live" for ever.
test('a silent connection is lost after 45 s, and one with comments is not', async () => {
  const clock = stoppedClock();
  let to;
  let cancelled = false;
  const body = new ReadableStream({ start: (controller) => (to = controller), cancel: () => (cancelled = true) });
  const write = (text) => to.enqueue(new TextEncoder().encode(text));
  const events = eventsOf(body, clock);
  const next = events.next();
  for (let i = 0; i < 4; i++) {
    await settled();
    clock.pass(44_000);
    write(': a comment\n\n');
  }
  await settled();
  write('data: 1\n\n');
  assert.deepEqual((await next).value, { event: 'message', data: '1' });
  const last = assert.rejects(events.next(), /nothing came for 45 s/);
  await settled();
  clock.pass(45_000);
  await last;
  await settled();
  assert.ok(cancelled, 'the connection is closed');

  const silent = stoppedClock();
  const heardOf = heard([open(snapshot(5)), open(snapshot(6))], 'live', silent);
  await settled();
  silent.pass(45_000);
  assert.deepEqual(await heardOf, ['live', 'lost: nothing came for 45 s', 'live']);
});

test('answers that end too early do not hang a test', async () => {
  await assert.rejects(heard([refusal(503, 'busy')], 'live'), /asked once more, after refused: busy/);
});
