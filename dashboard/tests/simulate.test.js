// `kvist simulate` and this page: the recording that the page shows, and the report in HTML. The program is $KVIST.
import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { mkdtemp, readFile, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, test } from 'node:test';
import { gunzipSync } from 'node:zlib';
import { program } from './kvist.js';
import { BUNDLE, browser } from './page.js';

const skip = program === undefined && 'KVIST names no program: `just dashboard-test` builds one';
after(() => browser.close());

test('the example can be replayed by the program', { skip }, async () => {
  const file = join(await mkdtemp(join(tmpdir(), 'kvist-')), 'example.jsonl');
  await writeFile(file, gunzipSync(await readFile(join(BUNDLE, 'example.jsonl.gz'))));
  const replayed = JSON.parse(execFileSync(program, ['simulate', 'replay', file, '--json']));
  assert.ok(replayed.decisions > 300, JSON.stringify(replayed));
});

// It was wider than a phone, and an hour was divided at 500 s.
test('a simulated run fits a phone, and counts minutes as clocks do', { skip }, async () => {
  const file = join(await mkdtemp(join(tmpdir(), 'kvist-')), 'run.html');
  execFileSync(program, ['simulate', '--requests', '120', '--arrivals', 'poisson:per_s=0.1', '--html', file], { stdio: 'ignore' });
  const context = await browser.newContext({ viewport: { width: 375, height: 812 } });
  const page = await context.newPage();
  await page.goto(`file://${file}`);
  assert.ok((await page.evaluate(() => document.documentElement.scrollWidth)) <= 375);
  const ticks = await page.locator('svg .tick').allTextContents();
  assert.ok(ticks.some((text) => /^\d+ min$/.test(text)), ticks.join());
  assert.ok(!ticks.some((text) => /^\d{3,} s$/.test(text)), ticks.join());
  await context.close();
});
