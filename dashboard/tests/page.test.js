// The page in a real browser: the example, recordings, the tour. `npm test`, behind `npm run build`.
import assert from 'node:assert/strict';
import { readFile, writeFile, mkdtemp } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { gunzipSync } from 'node:zlib';
import { browser, calls, open, pass, serve } from './page.js';

let server;
before(async () => (server = await serve()));
after(async () => {
  server.close();
  await browser.close();
});

/** What the figures above the map say. */
const figures = (page) => page.$$eval('dl div', (all) => Object.fromEntries(all.map((div) => [div.querySelector('dt').textContent, div.querySelector('dd').textContent])));
const moment = (page) => page.getByRole('slider', { name: 'Moment' }).inputValue().then(Number);
const seek = async (page, share) => {
  const slider = page.getByRole('slider', { name: 'Moment' });
  const [min, max] = await slider.evaluate((input) => [Number(input.min), Number(input.max)]);
  await slider.evaluate((input, at) => {
    input.value = at;
    input.dispatchEvent(new Event('input', { bubbles: true }));
  }, min + (max - min) * share);
  await pass(page, 60);
};
const map = (page) => page.getByRole('region', { name: 'Block map' }).locator('canvas');
/** Colours of a canvas, as a text to compare. */
const pixels = (locator) => locator.evaluate((canvas) => canvas.toDataURL());

async function ready(page) {
  await page.getByRole('region', { name: 'Block map' }).waitFor();
  await page.waitForFunction(() => document.querySelector('.map canvas').calls?.clearRect > 0);
  await pass(page, 200);
}
async function calm(page) {
  assert.deepEqual(page.errors, []);
  assert.deepEqual(page.foreign, [], 'requests to elsewhere');
  await page.context().close();
}

test('without a server the example is shown', async () => {
  const page = await open(server.url);
  await ready(page);
  const text = await page.getByRole('banner').or(page.locator('.top')).first().innerText();
  assert.match(text, /Recording · Example/);
  const { running, evicted, found } = await figures(page);
  assert.ok(Number(running) > 3 && Number(evicted) > 50 && parseInt(found, 10) > 30, JSON.stringify({ running, evicted, found }));
  assert.equal(await page.getByText('Playground').count(), 0, 'nothing to talk to');
  await calm(page);
});

test('scrubbing moves everything, and comes back to the same', async () => {
  const page = await open(server.url);
  await ready(page);
  await seek(page, 0.2);
  const [early, earlyMap] = [await figures(page), await pixels(map(page))];
  await seek(page, 0.9);
  const [late, lateMap] = [await figures(page), await pixels(map(page))];
  assert.notEqual(earlyMap, lateMap);
  assert.ok(Number(late.evicted) > Number(early.evicted));
  await seek(page, 0.2);
  assert.deepEqual(await figures(page), early);
  assert.equal(await pixels(map(page)), earlyMap);
  await calm(page);
});

test('it plays, pauses and steps', async () => {
  const page = await open(server.url);
  await ready(page);
  await seek(page, 0.1);
  const begin = await moment(page);
  await page.getByRole('button', { name: 'Play', exact: true }).click();
  await page.waitForFunction((begin) => document.querySelector('input[type=range]').value > begin + 0.3e9, begin);
  await page.getByRole('button', { name: 'Pause' }).click();
  await pass(page); // what is drawn already is one frame behind
  const still = await moment(page);
  await pass(page, 200);
  assert.equal(await moment(page), still);
  await page.getByRole('button', { name: 'One event on' }).click();
  await pass(page);
  const on = await moment(page);
  assert.ok(on > still);
  await page.getByRole('button', { name: 'One event back' }).click();
  await page.getByRole('button', { name: 'One event back' }).click();
  await pass(page);
  assert.ok((await moment(page)) <= still);
  await calm(page);
});

// A button that had been clicked kept the space for itself.
test('space plays and pauses, whatever was clicked before', async () => {
  const page = await open(server.url);
  await ready(page);
  const play = page.getByRole('button', { name: 'Play', exact: true });
  const pause = page.getByRole('button', { name: 'Pause' });
  for (const name of ['One event on', 'References', /^Theme/]) {
    await page.getByRole('button', { name }).click();
    await page.keyboard.press(' ');
    await pause.waitFor();
    await page.keyboard.press(' ');
    await play.waitFor();
  }
  await page.getByRole('slider', { name: 'Moment' }).click();
  await page.keyboard.press(' ');
  await pause.waitFor();
  await page.keyboard.press(' ');
  await play.waitFor();
  // With the focus on the button, the space bar presses it.
  const before = await moment(page);
  await page.getByRole('button', { name: 'One event back' }).focus();
  await page.keyboard.press(' ');
  await pass(page);
  assert.ok((await moment(page)) < before);
  assert.equal(await pause.count(), 0);
  await calm(page);
});

// Its last step lay on what it explained, and on a phone the third one did.
test('the tour covers nothing of what it explains', async () => {
  for (const viewport of [{ width: 1440, height: 900 }, { width: 1100, height: 800 }, { width: 375, height: 812 }]) {
    const page = await open(server.url, { viewport, reducedMotion: 'reduce' });
    await ready(page);
    await page.keyboard.press('t');
    const dialog = page.getByRole('dialog');
    for (let step = 1; step <= 7; step++) {
      await dialog.getByText(`${step} / 7`).waitFor();
      const look = async () => {
        const [over, spot] = [await dialog.boundingBox(), await page.locator('.spot').boundingBox()];
        const overlap = (at, size) => Math.max(0, Math.min(over[at] + over[size], spot[at] + spot[size]) - Math.max(over[at], spot[at]));
        const covered = (overlap('x', 'width') * overlap('y', 'height')) / (spot.width * spot.height);
        const above = Math.max(0, -spot.y) / spot.height;
        return { over, spot, seen: covered + above < 0.1 && over.y >= 0 && over.y + over.height <= viewport.height };
      };
      // It comes to rest where it is seen, and stays there.
      let seen = 0;
      let last;
      for (let i = 0; i < 300 && seen < 4; i++) {
        await pass(page, 100);
        last = await look();
        seen = last.seen ? seen + 1 : 0;
      }
      assert.ok(seen >= 4, `step ${step} of ${viewport.width} px: ${JSON.stringify(last)}`);
      await dialog.getByRole('button', { name: step < 7 ? 'Next' : 'Done' }).click();
    }
    await calm(page);
  }
});

test('a block is told on hover, and its life on a click, with the keyboard too', async () => {
  const page = await open(server.url);
  await ready(page);
  const box = await map(page).boundingBox();
  await page.mouse.move(box.x + 20, box.y + 20);
  const tip = page.locator('.tip').first();
  await tip.waitFor();
  assert.match(await tip.innerText(), /Block 0[\s\S]*held by \d+[\s\S]*sequence \d+[\s\S]*0–15[\s\S]*last touched/);
  await page.mouse.click(box.x + 20, box.y + 20);
  const life = page.getByRole('region', { name: 'Life of block 0' });
  await life.waitFor();
  assert.ok((await life.locator('li').count()) > 10);
  const first = life.locator('li button').first();
  assert.match(await first.innerText(), /given to #0/);
  await first.click();
  await page.waitForFunction(() => Number(document.querySelector('input[type=range]').value) < 2e9); // where the event was
  await page.mouse.move(5, 5);
  await map(page).focus();
  await page.keyboard.press('ArrowRight');
  await page.keyboard.press('ArrowRight');
  await page.keyboard.press('Enter');
  await page.getByRole('region', { name: 'Life of block 1' }).waitFor();
  await page.keyboard.press('Escape');
  assert.equal(await page.getByRole('region', { name: /Life of block/ }).count(), 0);
  await calm(page);
});

test('requests, sequences and charts are told to the keyboard as well', async () => {
  const page = await open(server.url);
  await ready(page);
  const said = (region) => page.getByRole('region', { name: region, exact: true }).locator('[aria-live]').innerText();
  const timeline = page.getByRole('region', { name: 'Requests over time' });
  await timeline.locator('canvas').focus();
  await page.keyboard.press('ArrowDown');
  const first = await said('Requests over time');
  assert.match(first, /^Request \d+, \d+ tokens of prompt, \d+ of them found/);
  assert.match(await timeline.locator('.tip').innerText(), new RegExp(first.split(',')[0]));
  const lanes = [first];
  for (let i = 0; i < 30; i++) {
    await page.keyboard.press('ArrowDown');
    lanes.push(await said('Requests over time'));
  }
  assert.equal(new Set(lanes).size, 31);
  const [field, tip] = [await timeline.locator('canvas').boundingBox(), await timeline.locator('.tip').boundingBox()];
  assert.ok(tip.y > field.y && tip.y < field.y + field.height, 'it is in view');
  for (let i = 0; i < 30; i++) await page.keyboard.press('ArrowUp');
  assert.equal(await said('Requests over time'), first);
  await page.keyboard.press('Escape');
  assert.equal(await timeline.locator('.tip').count(), 0);

  await page.getByRole('application', { name: 'Live sequences' }).focus();
  const rows = new Set();
  for (let i = 0; i < 3; i++) {
    await page.keyboard.press('ArrowDown');
    rows.add(await said('Shared blocks'));
  }
  assert.equal(rows.size, 3);
  for (const row of rows) assert.match(row, /^Sequence \d+, request \d+: \d+ blocks/);

  const before = await moment(page);
  await page.getByRole('application', { name: 'Tokens per second over time' }).focus();
  await page.keyboard.press('ArrowRight');
  await page.keyboard.press('ArrowRight');
  assert.match(await said('Tokens per second'), /^At [\d.]+ s: prefill \S+, decode \S+/);
  await page.keyboard.press('Enter');
  await pass(page);
  assert.ok((await moment(page)) > before, 'it goes there');
  await calm(page);
});

test('a wheel that Shift turns aside zooms too', async () => {
  const page = await open(server.url);
  await ready(page);
  const timeline = page.getByRole('region', { name: 'Requests over time' });
  const wheel = (more) => timeline.locator('canvas').evaluate((canvas, more) => canvas.dispatchEvent(new WheelEvent('wheel', { bubbles: true, cancelable: true, clientX: 700, ...more })), more);
  await wheel({ deltaX: -100 });
  assert.equal(await timeline.getByRole('button', { name: 'All' }).count(), 0, 'alone it moves, and there is nowhere to');
  await wheel({ deltaX: -100, shiftKey: true });
  await timeline.getByRole('button', { name: 'All' }).waitFor();
  await wheel({ deltaX: 100, shiftKey: true });
  await timeline.getByRole('button', { name: 'All' }).waitFor({ state: 'detached' });
  await calm(page);
});

test('every colouring is another picture', async () => {
  const page = await open(server.url, { reducedMotion: 'reduce' });
  await ready(page);
  const seen = new Set([await pixels(map(page))]);
  for (const name of ['References', 'Age', 'Heat']) {
    await page.getByRole('button', { name }).click();
    await pass(page, 80);
    seen.add(await pixels(map(page)));
  }
  assert.equal(seen.size, 4);
  await calm(page);
});

test('a dropped or chosen recording is shown, a wrong file is refused in words', async () => {
  const page = await open(server.url);
  await ready(page);
  const folder = await mkdtemp(join(tmpdir(), 'kvist-'));
  const example = gunzipSync(await readFile(new URL('../public/example.jsonl.gz', import.meta.url))).toString();
  // The first third, cut off in the middle of a line, as a program that was killed leaves it.
  await writeFile(join(folder, 'mine.jsonl'), example.slice(0, example.length / 3));
  await writeFile(join(folder, 'wrong.jsonl'), '{"hello":1}\n');
  await writeFile(join(folder, 'broken.jsonl'), '{"format":"kvist-recording","version":1}\nno json\n{}\n');
  await page.locator('input[type=file]').setInputFiles(join(folder, 'mine.jsonl'));
  await page.getByText('Recording · mine.jsonl').waitFor();
  await seek(page, 1);
  assert.ok(Number((await figures(page)).evicted) > 0);
  for (const [file, words] of [['wrong.jsonl', /does not begin with/], ['broken.jsonl', /line 2 is not JSON/]]) {
    await page.locator('input[type=file]').setInputFiles(join(folder, file));
    await page.getByRole('alert').getByText(words).waitFor();
    await page.getByRole('button', { name: 'Dismiss' }).click();
  }
  await page.getByText('Recording · mine.jsonl').waitFor();
  // The same file again: it is read anew.
  await seek(page, 0.5);
  await page.locator('input[type=file]').setInputFiles(join(folder, 'mine.jsonl'));
  await page.waitForFunction(() => document.querySelector('input[type=range]').value === document.querySelector('input[type=range]').min);
  const text = await page.evaluateHandle(() => {
    const transfer = new DataTransfer();
    transfer.setData('text/plain', 'a text');
    return transfer;
  });
  await page.dispatchEvent('body', 'dragover', { dataTransfer: text });
  await pass(page);
  assert.equal(await page.locator('.drop').count(), 0, 'a text is no recording');
  const data = await page.evaluateHandle((text) => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([text], 'dropped.jsonl'));
    return transfer;
  }, example);
  await page.dispatchEvent('body', 'drop', { dataTransfer: data });
  await page.getByText('Recording · dropped.jsonl').waitFor();
  await calm(page);
});

// It offered to write something, where there was nothing to write to.
test('a recording without a request says so', async () => {
  const page = await open(server.url);
  await ready(page);
  const lines = [{ format: 'kvist-recording', version: 1, groups: [{ block_tokens: 16, blocks: 64, window: null }] }, { n: 0, at: 1e9, steps: 1, elapsed: 1e7, sampled: [], finished: [] }];
  await page.locator('input[type=file]').setInputFiles({ name: 'empty.jsonl', mimeType: 'text/plain', buffer: Buffer.from(lines.map((line) => JSON.stringify(line)).join('\n')) });
  await page.getByText('Recording · empty.jsonl').waitFor();
  const timeline = page.getByRole('region', { name: 'Requests over time' });
  await timeline.getByText('No request was recorded.').waitFor();
  assert.equal(await timeline.getByRole('button', { name: 'Write something here' }).count(), 0);
  await calm(page);
});

/** A recording of one block that is given out and freed `n` times, a second apart. */
const busyBlock = (n) => {
  const lines = [{ format: 'kvist-recording', version: 1, groups: [{ block_tokens: 16, blocks: 64, window: null }] }];
  for (let i = 0; i < n; i++) lines.push({ step: i, at: i * 1e9, blocks: [[0, 'alloc', 0, i, 'append'], [0, 'free', 0, i, 'remove']] });
  return { name: 'busy.jsonl', mimeType: 'text/plain', buffer: Buffer.from(lines.map((line) => JSON.stringify(line)).join('\n')) };
};

// The last 400 events were shown, wherever one was.
test('of a long life, the list shows the part around the moment', async () => {
  const page = await open(server.url);
  await ready(page);
  await page.locator('input[type=file]').setInputFiles(busyBlock(600));
  await page.getByText('Recording · busy.jsonl').waitFor();
  await map(page).click({ position: { x: 20, y: 20 } });
  const life = page.getByRole('region', { name: 'Life of block 0' });
  await life.getByText('400 of 1,200 events').waitFor();
  const ends = async () => [await life.locator('.at').first().innerText(), await life.locator('.at').last().innerText()];
  assert.deepEqual(await ends(), ['0.00 s', '3:19.00']);
  await seek(page, 0.5);
  assert.deepEqual(await ends(), ['3:20.00', '6:39.00']);
  await seek(page, 1);
  assert.deepEqual(await ends(), ['6:40.00', '9:59.00']);
  await calm(page);
});

// The example, which came later, took its place.
test('a file that is opened while the example is read stays', async () => {
  const page = await open(server.url);
  await ready(page);
  let release;
  const released = new Promise((resolve) => (release = resolve));
  await page.route('**/example.jsonl.gz', async (route) => {
    await released;
    await route.continue();
  });
  await page.reload();
  await page.getByText('Reading a recording …').waitFor();
  await page.locator('input[type=file]').setInputFiles(busyBlock(3));
  await page.getByText('Recording · busy.jsonl').waitFor();
  const loaded = page.waitForResponse('**/example.jsonl.gz');
  release();
  await (await loaded).finished();
  await pass(page, 300);
  assert.match(await page.locator('.source').innerText(), /Recording · busy\.jsonl/);
  await calm(page);
});

test('the tour goes through all its steps, by keyboard, and points at what it tells of', async () => {
  const page = await open(server.url, { reducedMotion: 'reduce' });
  await ready(page);
  await page.keyboard.press('t');
  const dialog = page.getByRole('dialog');
  await dialog.waitFor();
  const titles = [];
  for (;;) {
    await dialog.getByText(`${titles.length + 1} / 7`).waitFor();
    titles.push(await dialog.locator('h2').innerText());
    await page.waitForFunction(() => document.querySelectorAll('.spot').length === 1);
    const done = (await dialog.getByRole('button', { name: 'Done' }).count()) > 0;
    await dialog.getByRole('button', { name: done ? 'Done' : 'Next' }).press('Enter');
    if (done) break;
  }
  assert.ok(titles.length === 7 && new Set(titles).size === 7, titles.join());
  assert.equal(await dialog.count(), 0);
  assert.equal(await page.locator('.spot').count(), 0);
  const theme = page.getByRole('button', { name: /^Theme/ });
  await theme.focus();
  await page.keyboard.press('t');
  await dialog.waitFor();
  await page.keyboard.press('Escape');
  assert.equal(await dialog.count(), 0);
  assert.ok(await theme.evaluate((button) => button === document.activeElement), 'the focus is where it was');
  await calm(page);
});

test('light and dark, wide and narrow: nothing sticks out', async () => {
  for (const colorScheme of ['light', 'dark']) {
    for (const width of [1600, 1000, 700, 360]) {
      const page = await open(server.url, { colorScheme, viewport: { width, height: 800 } });
      await ready(page);
      const wide = await page.evaluate(() => document.documentElement.scrollWidth);
      assert.ok(wide <= width, `${wide} of ${width} pixels in ${colorScheme}`);
      await calm(page);
    }
  }
});

test('a hundred thousand blocks are one image each time, and are left alone when nothing happens', async () => {
  const page = await open(server.url);
  await ready(page);
  const lines = [{ format: 'kvist-recording', version: 1, groups: [{ block_tokens: 16, blocks: 100000, window: null }] }];
  let n = 0;
  for (let step = 0; step < 400; step++) {
    const at = step * 1e7;
    if (step % 4 === 0) {
      const id = step / 4;
      lines.push({ n: n++, at, arrive: { id, arrival_ns: at, prompt_tokens: 16000, max_new: 10 } });
      lines.push({ n: n++, at, steps: 1, elapsed: 1e7, sampled: [null], finished: [] });
      lines.push({ step, at, admit: id, seq: id, hit: 0 }, { step, at, chunk: id, first: 0, tokens: 16000 });
      lines.push({ step, at, blocks: Array.from({ length: 1000 }, (_, i) => [0, 'alloc', id * 1000 + i, id, 'append']) });
    } else lines.push({ n: n++, at, steps: 1, elapsed: 1e7, sampled: [null], finished: [] });
  }
  const text = lines.map((line) => JSON.stringify(line)).join('\n');
  await page.locator('input[type=file]').setInputFiles({ name: 'large.jsonl', mimeType: 'text/plain', buffer: Buffer.from(text) });
  await page.getByText('Recording · large.jsonl').waitFor();
  await page.getByText('100,000 blocks').waitFor();
  await pass(page, 100);
  const begun = await calls(map(page));
  for (let i = 0; i < 10; i++) await seek(page, i / 10);
  const sought = await calls(map(page));
  assert.equal(sought.clearRect - begun.clearRect, 10, 'a drawing for each moment');
  assert.equal(sought.putImageData - begun.putImageData, 10, 'and one image for each drawing');
  assert.equal(sought.fill, begun.fill);
  // Playing makes blocks glow where cells are large. Behind a pause nothing may go on.
  await page.getByLabel('Speed').selectOption('0.1');
  await seek(page, 0.2);
  await page.getByRole('button', { name: 'Play', exact: true }).click();
  await page.waitForFunction((before) => document.querySelector('.map canvas').calls.clearRect > before + 5, sought.clearRect);
  await page.getByRole('button', { name: 'Pause' }).click();
  await page.mouse.move(5, 5);
  await pass(page, 1000);
  const paused = await calls(map(page));
  await pass(page, 500);
  assert.deepEqual(await calls(map(page)), paused);
  await calm(page);
});
