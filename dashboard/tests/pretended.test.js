// The page against a live stream that a test makes up: what is drawn how often, restarts, refusals.
import assert from 'node:assert/strict';
import { after, test } from 'node:test';
import { Load, pretend } from './load.js';
import { browser, calls, open, pass } from './page.js';

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
  await page.waitForTimeout(300);
  const from = await now(page);
  const [mapBegun, begun] = [await calls(map(page)), await calls(chart)];
  for (let i = 0; i < 15; i++) {
    server.tell(load.turn());
    await pass(page, 100);
  }
  const [told, mapTold, to] = [await calls(chart), await calls(map(page)), await now(page)];
  const [drawn, ofMap] = [told.clearRect - begun.clearRect, mapTold.clearRect - mapBegun.clearRect];
  assert.ok(drawn >= 2 && drawn <= (to - from) / 250 + 1, `${drawn} drawings of a chart in ${to - from} ms`);
  assert.ok(ofMap >= drawn, `${ofMap} of the map, ${drawn} of a chart`);
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
  await page.getByText('Live · next').waitFor({ timeout: 300000 });
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
  server.refuse(429, '16 listen already: close another dashboard');
  const page = await open(server.url);
  await page.getByText('16 listen already: close another dashboard').waitFor();
  await page.getByText('Recording · Example').waitFor();
  await page.getByRole('button', { name: 'API key' }).waitFor();
  server.refuse(null);
  await page.getByText('Live · pretended').waitFor({ timeout: 300000 });
  assert.equal(await page.getByText('16 listen already').count(), 0);
  await calm(page);
});

test('what a server does is not shown on a recording', async () => {
  const load = small();
  const { server, page } = await live(load);
  await page.getByRole('button', { name: 'Replay' }).click();
  await page.getByText('Recording · Example').waitFor();
  await page.waitForTimeout(400);
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
  await page.waitForTimeout(100);
  await calm(page);
});

test('bytes are told where a block is the same in all layers', async () => {
  const load = small();
  const { page } = await live(load);
  const saved = page.getByRole('region', { name: 'Who shares what' }).locator('.saved');
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
  assert.match(await other.getByRole('region', { name: 'Who shares what' }).locator('.saved').innerText(), /sharing saves \d+ blocks, \d+%$/);
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
