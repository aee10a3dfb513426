// The page against a live stream that a test makes up: what is drawn how often, restarts, refusals.
import assert from 'node:assert/strict';
import { after, test } from 'node:test';
import { Load } from './load.js';
import { browser, calls, frames, open, pass } from './page.js';
import { pretend } from './pretend.js';

const servers = [];
after(async () => {
  await browser.close();
  servers.forEach((server) => server.close());
});
const map = (page) => page.getByRole('region', { name: 'Block map' }).locator('canvas');
const figures = (page) => page.$$eval('dl div', (all) => Object.fromEntries(all.map((div) => [div.querySelector('dt').textContent, div.querySelector('dd').textContent])));
const small = () => new Load({ blocks: 240, running: 6, long: 20 });
/** The page's clock. */
const now = (page) => page.evaluate(() => performance.now());

/** A page that is live with `load`. */
async function live(load, options) {
  const server = await pretend(() => load.snapshot());
  servers.push(server);
  const page = await open(server.url, options);
  await page.getByText('Live · pretended').waitFor();
  await page.getByRole('region', { name: 'Block map' }).waitFor();
  return { server, page };
}
async function calm(page) {
  assert.deepEqual(page.errors, []);
  await page.context().close();
}

test('a large live map is drawn once for each batch, as one image', async () => {
  const load = new Load();
  const { server, page } = await live(load);
  await page.getByText('100,000 blocks').waitFor();
  const from = await now(page);
  const begun = await calls(map(page));
  const batches = 12;
  for (let i = 0; i < batches; i++) {
    server.tell(load.turn());
    await pass(page, 100);
  }
  const [told, to] = [await calls(map(page)), await now(page)];
  const drawn = told.clearRect - begun.clearRect;
  // Once a second more, for the ages of blocks.
  assert.ok(drawn >= 2 && drawn <= batches + (to - from) / 1000 + 1, `${drawn} drawings of ${batches} batches in ${to - from} ms`);
  assert.equal(told.putImageData - begun.putImageData, drawn);
  assert.equal(told.fill, begun.fill, 'no cell by itself');
  await calm(page);
});

test('while blocks glow, only the map is drawn with every frame', async () => {
  const load = small();
  const { server, page } = await live(load);
  const chart = page.getByRole('region', { name: 'Tokens per second' }).locator('canvas');
  server.tell(load.turn());
  await chart.waitFor();
  await pass(page, 300);
  const from = await now(page);
  const [mapBegun, begun, framesBegun] = [await calls(map(page)), await calls(chart), await frames(page)];
  for (let i = 0; i < 15; i++) {
    server.tell(load.turn());
    await pass(page, 100);
  }
  const [told, mapTold, framesTold, to] = [await calls(chart), await calls(map(page)), await frames(page), await now(page)];
  const [drawn, ofMap, all] = [told.clearRect - begun.clearRect, mapTold.clearRect - mapBegun.clearRect, framesTold - framesBegun];
  assert.ok(drawn >= 2 && drawn <= (to - from) / 250 + 1, `${drawn} drawings of a chart in ${to - from} ms`);
  // The counts are read one after the other, and a blow of a busy machine may let all blocks go out.
  assert.ok(ofMap >= 0.8 * all - 3 && ofMap <= all + 5, `${ofMap} drawings of the map in ${all} frames`);
  // What is slow comes late, but comes.
  await pass(page, 300);
  assert.equal((await figures(page)).running, String(load.sequences.length));
  await calm(page);
});

test('behind a restart of the server, charts and figures begin anew', async () => {
  const load = small();
  load.at = 5e12;
  const { server, page } = await live(load);
  for (let i = 0; i < 3; i++) server.tell(load.turn());
  await page.waitForFunction(() => document.querySelector('[aria-label="Tokens per second"] b')?.textContent !== '–');
  await map(page).click({ position: { x: 20, y: 20 } });
  await page.getByRole('region', { name: /Life of block/ }).waitFor();
  const next = small();
  next.model = 'next';
  next.at = 3e9;
  server.restart(() => next.snapshot());
  await page.getByText('Live · next').waitFor();
  assert.equal(await page.getByRole('region', { name: /Life of block/ }).count(), 0, 'it is another block now');
  const chart = page.getByRole('region', { name: 'Tokens per second' });
  const moves = async () => (await chart.locator('b').nth(1).innerText()) !== '–' && Number((await figures(page))['tokens/s']) > 0;
  for (let i = 0; i < 100 && !(await moves()); i++) {
    server.tell(next.turn());
    await pass(page, 100);
  }
  assert.ok(await moves(), JSON.stringify(await figures(page)));
  await calm(page);
});

test('a server without a place is waited for, and says why', async () => {
  const load = small();
  const server = await pretend(() => load.snapshot());
  servers.push(server);
  server.refuse(429, '16 dashboards are connected already: close one of them');
  const page = await open(server.url);
  await page.getByText('16 dashboards are connected already: close one of them').waitFor();
  await page.getByText('Recording · Example').waitFor();
  await page.getByRole('button', { name: 'API key' }).waitFor();
  server.refuse(null);
  await page.getByText('Live · pretended').waitFor();
  assert.equal(await page.getByText('16 dashboards are connected already').count(), 0);
  await calm(page);
});

test('what a server does is not shown on a recording', async () => {
  const load = small();
  const { server, page } = await live(load);
  await page.getByRole('button', { name: 'Replay' }).click();
  await page.getByText('Recording · Example').waitFor();
  await pass(page, 400);
  const before = await calls(map(page));
  for (let i = 0; i < 3; i++) server.tell(load.turn());
  await pass(page, 150);
  await page.keyboard.press('.');
  await pass(page, 150);
  const later = await calls(map(page));
  assert.ok(later.clearRect > before.clearRect, 'it was drawn');
  assert.equal(later.stroke, before.stroke, 'and nothing glows');
  await calm(page);
});

test('of blocks that were there before the page, no past is made up', async () => {
  const load = small();
  const { server, page } = await live(load);
  const box = await map(page).boundingBox();
  const tip = page.locator('.tip').first();
  const told = [];
  for (const share of [0.05, 0.5]) {
    for (let x = 20; x < box.width; x += 60) {
      await page.mouse.move(box.x + x, box.y + box.height * share);
      if (await tip.count()) told.push(await tip.innerText());
    }
  }
  assert.ok(told.some((text) => text.includes('cached')) && told.some((text) => text.includes('held')), told.join('\n'));
  for (const text of told.filter((text) => !text.includes('free'))) assert.match(text, /last touched before this page was connected · heat 0\.0/);
  assert.ok(!told.some((text) => text.includes('-1')), told.join('\n'));
  await page.getByRole('button', { name: 'Age' }).click();
  await pass(page);
  await calm(page);
});

test('bytes are told where a block is the same in all layers', async () => {
  const load = small();
  const { page } = await live(load);
  const saved = page.getByRole('region', { name: 'Shared blocks' }).locator('.saved');
  assert.match(await saved.innerText(), /sharing saves \d+ blocks, \d+%, [\d.]+ (KiB|MiB)/);
  await calm(page);
  // Of two groups, a token's bytes are those of both, and blocks those of one.
  const mixed = () => {
    const snapshot = load.snapshot();
    snapshot.groups.push({ block_tokens: 16, blocks: 240, window: 64 });
    for (const sequence of snapshot.sequences) sequence.tables.push(sequence.tables[0].map((block, i, all) => (i < all.length - 4 ? null : block)));
    snapshot.idle.push([]);
    return snapshot;
  };
  const { page: other } = await live({ snapshot: mixed });
  assert.match(await other.getByRole('region', { name: 'Shared blocks' }).locator('.saved').innerText(), /sharing saves \d+ blocks, \d+%$/);
  await calm(other);
});

test('the tour waits for no server, and leaves the page where it was', async () => {
  const load = small();
  const { server, page } = await live(load);
  await page.keyboard.press('t');
  await page.getByRole('dialog').waitFor();
  await page.getByText('Recording · Example').waitFor();
  await page.keyboard.press('Escape');
  await page.getByText('Live · pretended').waitFor();
  // With another key it connects anew, and is not live yet.
  server.refuse(503, 'busy');
  await page.getByRole('button', { name: 'API key' }).click();
  await page.getByRole('button', { name: 'Connect' }).click();
  await page.keyboard.press('t');
  await page.getByRole('dialog').waitFor();
  await calm(page);
});

/** Nothing has ever happened here. */
const nothing = (more = {}) => ({
  format: 'kvist-live', version: 1, instance_id: 'pretended', model: 'pretended', at: 5e9, bytes_per_token: 4096, bound_bytes: 64 * 65536,
  groups: [{ block_tokens: 16, blocks: 64, window: null }], requests: [], sequences: [], idle: [[]], counters: {}, ...more,
});
async function begun(snapshot, options) {
  const server = await pretend(snapshot);
  servers.push(server);
  const page = await open(server.url, options);
  await page.getByText('Live · pretended').waitFor();
  await page.getByRole('region', { name: 'Block map' }).waitFor();
  return { server, page };
}
/** One request: it arrives, reads 40 tokens, writes one, and leaves two blocks to the index. */
const answered = (more = {}) => [
  { n: 0, at: 6e9, arrive: { id: 0, arrival_ns: 6e9, prompt_tokens: 40, max_new: 1, ...more } },
  { n: 1, at: 6e9, steps: 1, elapsed: 2e7, sampled: 1, finished: [0] },
  { step: 0, at: 6e9, admit: 0, seq: 0, hit: 0 }, { step: 0, at: 6e9, chunk: 0, first: 0, tokens: 40 },
  { step: 0, at: 6e9, blocks: [[0, 'alloc', 0, 0, 'append'], [0, 'alloc', 1, 0, 'append'], [0, 'alloc', 2, 0, 'append']] },
  { step: 1, at: 6.02e9, end: 0, how: 'length', generated: 1 },
  { step: 1, at: 6.02e9, blocks: [[0, 'store', 0, 0, 'append'], [0, 'store', 1, 0, 'append'], [0, 'idle', 0, 0, 'remove'], [0, 'idle', 1, 0, 'remove'], [0, 'free', 2, 0, 'remove']] },
];

// Axes said 0.000 of nothing, and the panel of requests was an empty frame.
test('a server that has done nothing says so, and what to do', async () => {
  const { page } = await begun(nothing());
  const charts = page.locator('section.chart');
  await charts.first().waitFor();
  for (let i = 0; i < (await charts.count()); i++) assert.match(await charts.nth(i).innerText(), /Nothing to show yet/);
  const timeline = page.getByRole('region', { name: 'Requests over time' });
  assert.match(await timeline.innerText(), /No request yet/);
  await timeline.getByRole('button', { name: 'Write something here' }).click();
  await page.getByRole('textbox', { name: /Message to Branch/ }).waitFor();
  await page.context().close();
});

// A lane was called 17, which is neither in the server's log nor in any answer.
test('lanes have the ids of the log', async () => {
  const { server, page } = await begun(nothing());
  const name = 'chatcmpl-0123456789abcdef0123456789abcdef';
  await page.evaluate(() => {
    window.written = new Set();
    const real = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
      window.written.add(text);
      return real.call(this, text, ...rest);
    };
  });
  server.tell(answered({ name, session: 'sess-00' }));
  await page.waitForFunction(() => window.written.has('chatcmpl-01234567…'));
  const timeline = page.getByRole('region', { name: 'Requests over time' });
  // The page may draw a frame before it changes its words.
  await timeline.getByText('No request yet').waitFor({ state: 'detached' });
  await timeline.locator('canvas').focus();
  await page.keyboard.press('ArrowDown');
  await timeline.locator('.tip').getByText(name).waitFor();
  assert.match(await timeline.locator('.tip').innerText(), new RegExp(`^${name}\\s+session sess-00`));
  await calm(page);
});

// Cached blocks were of a colour that the legend did not have.
test('the legend has the colours of the map', async () => {
  for (const colorScheme of ['light', 'dark']) {
    const { server, page } = await begun(nothing(), { colorScheme, reducedMotion: 'reduce' });
    server.tell(answered());
    const footer = page.getByRole('region', { name: 'Block map' }).locator('footer');
    await page.waitForFunction(() => document.querySelectorAll('.map footer b')[1].textContent === '2');
    await pass(page);
    const colour = await map(page).evaluate((canvas) => {
      const context = canvas.getContext('2d');
      // Somewhere in the first block: the first pixel of its row that is not empty.
      const { data } = context.getImageData(0, 20 * devicePixelRatio, canvas.width, 1);
      for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255 && data[i + 7] === 255) return `rgb(${data[i + 4]}, ${data[i + 5]}, ${data[i + 6]})`;
    });
    const shown = await footer.locator('i.cached').evaluate((swatch) => getComputedStyle(swatch).backgroundImage);
    assert.ok(shown.includes(colour), `${colour} is not in ${shown}`);
    await calm(page);
  }
});

// Between two answers the page had nothing to show of the branches of a conversation.
test('sessions at rest stay drawn, and their blocks are pointed at', async () => {
  const { server, page } = await begun(nothing(), { reducedMotion: 'reduce' });
  const sharing = page.getByRole('region', { name: 'Shared blocks' });
  assert.match(await sharing.innerText(), /no session has a full block in the cache/);
  server.tell(answered({ name: 'cmpl-1', session: 'sess-aa11bb22' }));
  server.tellSessions([
    { id: 'sess-aa11bb22', parent: null, tokens: 41, running: false, tables: [[0, 1]] },
    { id: 'sess-cc33dd44', parent: 'sess-aa11bb22', tokens: 20, running: false, tables: [[0]] },
  ], 3);
  await sharing.getByText('0 live sequences, 2 at rest, 3 more sessions not listed').waitFor();
  assert.match(await sharing.locator('.saved').innerText(), /sharing saves 1 blocks, 33%, 64(\.0)? KiB/);
  assert.match(await sharing.locator('svg').innerHTML(), /sess-aa11bb…/);
  await pass(page, 100);
  const before = await map(page).evaluate((canvas) => canvas.toDataURL());
  await page.getByRole('application', { name: 'Live sequences and sessions at rest' }).focus();
  await page.keyboard.press('ArrowDown');
  assert.match(await sharing.locator('[aria-live]').innerText(), /^Session sess-\w+, at rest: \d blocks/);
  await pass(page);
  assert.notEqual(await map(page).evaluate((canvas) => canvas.toDataURL()), before, 'others are faint');
  server.tellSessions([]);
  await sharing.getByText('no session has a full block in the cache').waitFor();
  // What was pointed at is gone: the map went faint, and stayed so.
  await page.waitForFunction((before) => document.querySelector('.map canvas').toDataURL() === before, before);
  await calm(page);
});

// Connect said nothing to a key that is known, and not an admin's.
test('a key without the rights of an administrator is told what it can do', async () => {
  const server = await pretend(nothing());
  servers.push(server);
  server.refuse(403, 'the live view shows the requests of all users and needs an admin key');
  const page = await open(server.url);
  await page.getByText('it is not an admin key').waitFor();
  await page.getByText('The API and the Playground work with this key').waitFor();
  await page.getByText('Recording · Example').waitFor();
  await page.getByRole('button', { name: 'Playground' }).click();
  await page.getByRole('textbox', { name: /Message to Branch/ }).waitFor();
  assert.equal(await page.getByRole('region', { name: 'Block map' }).count(), 0, 'there is nothing of it to see');
  await page.getByRole('button', { name: 'Another key' }).click();
  await page.getByLabel('API key', { exact: true }).and(page.locator('input')).waitFor();
  await page.context().close();
});

/** The API of a model that goes on with texts, as the playground asks it: a token is a character. `down` has paths that are refused, `asked` every change of a session, with its key; `drop` lets the sessions expire. */
async function talking(page, down = []) {
  const sessions = new Map();
  let made = 0;
  const asked = [];
  const chunks = (text) => ({ contentType: 'text/event-stream', body: `data: ${JSON.stringify({ choices: [{ text, finish_reason: 'length' }] })}\n\ndata: [DONE]\n\n` });
  await page.route('**/v1/**', (route) => {
    const request = route.request();
    const [, , what, id, verb] = new URL(request.url()).pathname.split('/');
    const body = request.postDataJSON();
    if (down.includes(what)) return route.fulfill({ status: 503, json: { error: { message: 'too early' } } });
    if (what === 'models') return route.fulfill({ json: { data: [{ id: 'pretended', chat_template: false }] } });
    if (what === 'completions') return route.fulfill(chunks(' its memory'));
    if (request.method() !== 'GET') asked.push([request.headers().authorization?.slice(7), request.method(), id, verb, body?.text ?? body?.at]);
    if (!id && request.method() === 'GET') return route.fulfill({ json: { data: [] } });
    if (!id) {
      const name = `sess-${made++}`;
      sessions.set(name, '');
      return route.fulfill({ json: { id: name } });
    }
    if (id !== 'sess-fork' && !sessions.has(id)) return route.fulfill({ status: 404, json: { error: { message: `there is no session ${id}` } } });
    if (verb === 'append') sessions.set(id, sessions.get(id) + body.text);
    if (verb === 'fork') return route.fulfill({ json: { sessions: [{ id: 'sess-fork' }] } });
    // An answer begins and does not end; the session has more of it than the page was given.
    if (verb === 'generate') return sessions.set(id, `${sessions.get(id)} and frees it`);
    const text = sessions.get(id);
    return route.fulfill({ json: { id, text, messages: null, n_tokens: text?.length, running: false } });
  });
  await page.getByRole('button', { name: 'Playground' }).click();
  return { asked, down, drop: () => sessions.clear() };
}
const pieces = (page) => page.locator('li .text').allInnerTexts();
const say = async (page, text) => {
  await page.getByRole('textbox', { name: /Message to Branch/ }).fill(text);
  await page.keyboard.press('Enter');
};

// What a chat is was taken for a text where the server had not said; a session that was made late could not be cut; what came behind Stop was in the session and not on the page.
test('a text is what its session has, wherever it was stopped, and is cut where it is shown', async () => {
  const { page } = await begun(nothing());
  const { asked, down } = await talking(page, ['models', 'sessions']);
  await say(page, 'A vector owns');
  await page.getByText('The server did not say which model it has: too early').waitFor();
  assert.deepEqual([await pieces(page), asked], [[], []], 'nothing was sent');
  down.shift();
  await page.keyboard.press('Enter');
  const goOn = page.getByRole('button', { name: 'Go on' });
  await goOn.waitFor();
  assert.deepEqual([await pieces(page), asked], [['A vector owns', ' its memory'], []], 'without sessions');
  down.shift();
  await goOn.click();
  const stop = page.getByRole('button', { name: 'Stop', exact: true });
  await page.waitForFunction(() => document.querySelectorAll('li').length === 3);
  await stop.click();
  await goOn.waitFor();
  assert.deepEqual(await pieces(page), ['A vector owns', ' its memory', ' and frees it']);
  await page.getByRole('button', { name: 'Fork', exact: true }).first().click();
  await page.waitForFunction(() => document.querySelectorAll('section.branch').length === 2);
  assert.deepEqual(asked.map(([, ...rest]) => rest), [
    ['POST', undefined, undefined, undefined],
    ['POST', 'sess-0', 'append', 'A vector owns'],
    ['POST', 'sess-0', 'append', ' its memory'],
    ['POST', 'sess-0', 'generate', undefined],
    ['POST', 'sess-0', 'fork', 13],
  ]);
  await page.context().close();
});

// Branches went on in the sessions of the former key's name, which are not there for another one.
test('with another key, what was said goes on in new sessions', async () => {
  const { page } = await begun(nothing());
  const { asked } = await talking(page);
  const stop = page.getByRole('button', { name: 'Stop', exact: true });
  const goOn = page.getByRole('button', { name: 'Go on' });
  await say(page, 'A vector owns');
  await page.waitForFunction(() => document.querySelectorAll('li').length === 2);
  await stop.click();
  await goOn.waitFor();
  await page.getByRole('button', { name: 'API key' }).click();
  await page.getByLabel('API key', { exact: true }).and(page.locator('input')).fill('second');
  await page.getByRole('button', { name: 'Connect' }).click();
  await page.getByText('Live · pretended').waitFor();
  await goOn.click();
  await page.waitForFunction(() => document.querySelectorAll('li').length === 3);
  await stop.click();
  await goOn.waitFor();
  assert.deepEqual(await pieces(page), ['A vector owns', ' and frees it', ' and frees it']);
  assert.deepEqual(asked.slice(3), [
    [undefined, 'DELETE', 'sess-0', undefined, undefined],
    ['second', 'POST', undefined, undefined, undefined],
    ['second', 'POST', 'sess-1', 'append', 'A vector owns'],
    ['second', 'POST', 'sess-1', 'append', ' and frees it'],
    ['second', 'POST', 'sess-1', 'generate', undefined],
  ]);
  await page.context().close();
});

/** Says something, and stops the answer, which has begun. */
async function sayAndStop(page, text) {
  await say(page, text);
  await page.waitForFunction(() => document.querySelectorAll('li').length === 2);
  await page.getByRole('button', { name: 'Stop', exact: true }).click();
  await page.getByRole('button', { name: 'Go on' }).waitFor();
}

// A branch whose session had expired could do nothing any more.
test('what a server has dropped goes on in a new session', async () => {
  const { page } = await begun(nothing());
  const { asked, drop } = await talking(page);
  const stop = page.getByRole('button', { name: 'Stop', exact: true });
  const goOn = page.getByRole('button', { name: 'Go on' });
  await sayAndStop(page, 'A vector owns');
  /** Stops the answer of this session once it has begun. */
  const stopIn = async (id) => {
    while (asked.at(-1)[2] !== id || asked.at(-1)[3] !== 'generate') await pass(page, 50);
    await stop.click();
    await goOn.waitFor();
  };
  drop();
  await goOn.click();
  await stopIn('sess-1');
  assert.deepEqual(await pieces(page), ['A vector owns', ' and frees it', ' and frees it']);
  assert.deepEqual(asked.slice(3).map(([, ...rest]) => rest), [
    ['POST', 'sess-0', 'generate', undefined],
    ['POST', undefined, undefined, undefined],
    ['POST', 'sess-1', 'append', 'A vector owns'],
    ['POST', 'sess-1', 'append', ' and frees it'],
    ['POST', 'sess-1', 'generate', undefined],
  ]);
  // A message, a fork and a rollback get there as well.
  drop();
  await say(page, ' until');
  await stopIn('sess-2');
  assert.deepEqual(await pieces(page), ['A vector owns', ' and frees it', ' and frees it', ' until', ' and frees it']);
  drop();
  await page.getByRole('button', { name: 'Fork', exact: true }).first().click();
  await page.waitForFunction(() => document.querySelectorAll('section.branch').length === 2);
  await page.getByRole('button', { name: 'Roll back to here' }).first().click();
  await page.waitForFunction(() => document.querySelectorAll('section.branch')[0].querySelectorAll('li').length === 1);
  assert.equal(await page.locator('section.branch .error').count(), 0);
  await page.context().close();
});

test('behind a restart, branches go on in new sessions, and the model is asked for again', async () => {
  const { server, page } = await begun(nothing());
  const { asked, down, drop } = await talking(page);
  await sayAndStop(page, 'A vector owns');
  drop();
  down.push('sessions');
  server.restart(nothing({ instance_id: 'next', model: 'next' }));
  await page.getByText('Live · next').waitFor();
  down.pop();
  const before = asked.length;
  await page.getByRole('button', { name: 'Go on' }).click();
  while (!asked.slice(before).some(([, , , verb]) => verb === 'generate')) await pass(page, 50);
  const after = asked.slice(before).filter(([, method]) => method !== 'DELETE');
  assert.deepEqual(after.map(([, ...rest]) => rest), [
    ['POST', undefined, undefined, undefined],
    ['POST', 'sess-1', 'append', 'A vector owns'],
    ['POST', 'sess-1', 'append', ' and frees it'],
    ['POST', 'sess-1', 'generate', undefined],
  ]);
  await page.context().close();
});

// A sixth answer was a request that the browser held back, and the page said "writing".
test('as many answers as the browser has connections, and the others wait for them', async () => {
  const { page } = await begun(nothing());
  await talking(page);
  await sayAndStop(page, 'A vector owns');
  const branches = page.locator('section.branch');
  for (let n = 2; n <= 7; n++) {
    await branches.first().getByRole('button', { name: 'Fork', exact: true }).first().click();
    await page.waitForFunction((n) => document.querySelectorAll('section.branch').length === n, n);
  }
  await page.getByRole('button', { name: 'Let all go on' }).click();
  await page.waitForFunction(() => document.querySelectorAll('section.branch .note').length === 7);
  assert.equal(await page.getByText('writing …').count(), 5);
  assert.equal(await page.getByText('waits for another answer to end').count(), 2);
  await branches.first().getByRole('button', { name: 'Stop', exact: true }).click();
  await page.waitForFunction(() => document.querySelectorAll('section.branch .note').length === 6);
  assert.equal(await page.getByText('waits for another answer to end').count(), 1);
  // What is said to all stays with those that are busy.
  await page.getByRole('textbox', { name: 'Message to all branches' }).fill('and then');
  await page.keyboard.press('Enter');
  await page.waitForFunction(() => [...document.querySelectorAll('section.branch textarea')].filter(({ value }) => value === 'and then').length === 6);
  await page.context().close();
});

// The label said "Live" over a picture of long ago.
test('without a connection, the page does not say that it is live', async () => {
  const { server, page } = await begun(nothing());
  server.refuse(401, 'another key is needed');
  server.restart(nothing());
  await page.getByText('Not connected · pretended').waitFor();
  await page.getByText('The server wants an admin key').waitFor();
  const field = page.getByLabel('API key', { exact: true }).and(page.locator('input'));
  await field.fill('ключ');
  await page.getByRole('button', { name: 'Connect' }).click();
  await page.getByText('This key was not sent: the API key has characters that HTTP cannot send').waitFor();
  await page.context().close();
});

// A tooltip lay below the rows, and never came.
test('bars of shared blocks are on top of their rows', async () => {
  const load = small();
  const { page } = await live(load);
  const svg = page.getByRole('region', { name: 'Shared blocks' }).locator('svg');
  const box = await svg.locator('rect').first().boundingBox();
  const [x, y] = [box.x + box.width / 2, box.y + 4];
  await page.mouse.move(x, y);
  const title = await page.evaluate(([x, y]) => document.elementFromPoint(x, y).querySelector('title')?.textContent, [x, y]);
  assert.match(title, /^\d+ blocks, \d+ tokens from \d+ on, held by/);
  await svg.locator('rect[opacity="0.25"]').first().waitFor();
  await calm(page);
});

test('the tree of the last draft is drawn, and nothing where no server speculates', async () => {
  const load = small();
  const { server, page } = await live(load);
  const card = page.getByRole('region', { name: 'Drafts' });
  server.tell(load.turn());
  await pass(page, 400);
  assert.equal(await card.count(), 0);
  const lines = load.turn();
  const { seq } = load.sequences.at(-2);
  delete lines[0].sampled;
  Object.assign(lines[0], { drafts: [[0, seq, [null, 0, 0, null]]], advances: [{ path: [0, 1, 3], emitted: 3 }] });
  server.tell(lines);
  await card.waitFor();
  await card.getByText('2 of 4 draft tokens accepted').waitFor();
  await card.getByText('3 tokens in this step').waitFor();
  assert.deepEqual([await card.locator('circle.accepted').count(), await card.locator('circle').count(), await card.locator('line.accepted').count()], [2, 4, 2]);
  await calm(page);
});

test('what is below the cache is shown, and only if there is something', async () => {
  const MS = 1e6;
  const groups = [{ block_tokens: 16, blocks: 64, window: null }];
  const snapshot = (more) => ({ version: 1, instance_id: 'first', model: 'pretended', at: 0, bytes_per_token: 1024, bound_bytes: 1 << 20, groups, requests: [], sequences: [], idle: [[]], ...more });
  const server = await pretend(snapshot({ tiers: ['ram', 'disk'] }));
  servers.push(server);
  const page = await open(server.url);
  await page.getByText('Live · pretended').waitFor();
  const panel = page.getByRole('region', { name: 'Tiers' });
  await panel.waitFor();
  server.tell([
    { n: 0, at: 0, arrive: { id: 3, arrival_ns: 0, prompt_tokens: 100, max_new: 4, name: 'cmpl-0123456789abcdef' } },
    { step: 0, at: 200 * MS, load: 3, seq: 7, hit: 16, tokens: 64, runs: [{ tier: 0, until: 48 }, { tier: 1, until: 80 }] },
    { step: 0, at: 200 * MS, blocks: [[0, 'alloc', 9, 7, 'open'], ...[0, 1, 2, 3].map((block) => [0, 'alloc', block, 7, 'load'])] },
  ]);
  server.tellTiers({
    tiers: [{ name: 'ram', bytes: 3 << 20, capacity_bytes: 4 << 20, blocks: 48, loaded_tokens: 640, errors: 0 }, { name: 'disk', bytes: null, capacity_bytes: 2 ** 41, blocks: null, loaded_tokens: 32, errors: 2 }],
    load_bytes: 4 * 16384, store_bytes: 0,
  });
  await page.waitForFunction(() => document.querySelector('[aria-label=Tiers]')?.innerText.includes('1 request is loading'));
  const told = await panel.innerText();
  for (const part of ['64.0 KiB on the way up', '3.00 MiB of 4.00 MiB', '48 blocks there', '640 tokens loaded', '2.00 TiB, use not counted', '2 errors', '2 on the map came from it']) assert.ok(told.includes(part), `${part} is missing in ${told}`);
  assert.equal((await figures(page)).loading, '1');
  assert.equal((await figures(page)).waiting, '0');
  // The row says what is on its way, also to those that see no colours.
  const rows = page.getByRole('region', { name: 'Requests over time' });
  assert.ok((await rows.innerText()).includes('loading'));
  await rows.locator('canvas').focus();
  await page.keyboard.press('ArrowDown');
  await rows.locator('.tip').waitFor();
  assert.match(await rows.locator('.tip').innerText(), /loading 64 tokens: 32 from ram, 32 from disk/);
  // The map by source.
  await page.getByRole('button', { name: 'Source' }).click();
  const footer = page.locator('.map footer').last();
  await page.waitForFunction(() => /from disk\s*2/.test(document.querySelector('section.map footer')?.textContent));
  assert.match(await footer.textContent(), /from ram\s*2/);
  await map(page).focus();
  for (let i = 0; i < 3; i++) await page.keyboard.press('ArrowRight');
  assert.match(await page.getByRole('region', { name: 'Block map' }).locator('.tip').innerText(), /being imported[^]*loaded from disk/);
  server.tell([{ step: 0, at: 900 * MS, loaded: 3, tokens: 64 }, { step: 0, at: 900 * MS, blocks: [0, 1, 2, 3].map((block) => [0, 'store', block, 7, 'load']) }]);
  await page.waitForFunction(() => !document.querySelector('[aria-label=Tiers]').innerText.includes('is loading'));
  // What of the map is below it.
  assert.equal(await page.getByRole('button', { name: 'Below' }).count(), 0, 'as long as the server has not said it');
  server.tellBelow({ group: 0, runs: [[[0, 2], [9, 1]], [[1, 1], [20, 5]]] });
  await page.getByRole('button', { name: 'Below' }).click();
  await page.waitForFunction(() => /also in ram\s*3[^]*also in disk\s*1[^]*in no tier: gone when evicted\s*2/.test(document.querySelector('section.map footer')?.textContent));
  await page.waitForFunction(() => /3 also on the map[^]*1 also on the map/.test(document.querySelector('[aria-label=Tiers]').innerText));
  await map(page).focus();
  const tip = page.getByRole('region', { name: 'Block map' }).locator('.tip');
  await page.keyboard.press('ArrowLeft');
  assert.match(await tip.innerText(), /Block 1[^]*also in ram and disk/);
  await page.keyboard.press('ArrowRight');
  assert.match(await tip.innerText(), /Block 2[^]*in no tier/);
  // A block that is given away has other content.
  server.tell([{ step: 1, at: 950 * MS, blocks: [[0, 'free', 9, 7, 'end'], [0, 'alloc', 9, 8, 'grow']] }]);
  await page.waitForFunction(() => /also in ram\s*2/.test(document.querySelector('section.map footer')?.textContent));
  if (process.env.KVIST_SHOT) await page.screenshot({ path: process.env.KVIST_SHOT, fullPage: true });

  // Another server has none: nothing is left of them.
  server.restart({ ...snapshot({}), instance_id: 'second', model: 'flat' });
  await page.getByText('Live · flat').waitFor();
  await panel.waitFor({ state: 'detached' });
  assert.equal(await page.getByRole('button', { name: /Source|Below/ }).count(), 0);
  assert.equal((await figures(page)).loading, undefined);
  assert.equal(await page.getByRole('button', { name: 'Sequence' }).getAttribute('aria-pressed'), 'true');
  await calm(page);
});
