// The page of a running `kvist serve`: the program is $KVIST, as `just dashboard-test` builds it. Skipped where there is none:
// what cargo built last may have the page of yesterday embedded.
import assert from 'node:assert/strict';
import { mkdtemp, readFile, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after, test } from 'node:test';
import { program, start as begin } from './kvist.js';
import { BUNDLE, browser, open, pass } from './page.js';

const skip = program === undefined && 'KVIST names no program: `just dashboard-test` builds one';
const servers = [];
/** A server that is stopped after the tests, also if one of them fails. */
async function start(...flags) {
  const server = await begin(...flags);
  servers.push(server);
  return server;
}
after(async () => {
  await browser.close();
  await Promise.all(servers.map((server) => server.stop()));
});

const figures = (page) => page.$$eval('dl div', (all) => Object.fromEntries(all.map((div) => [div.querySelector('dt').textContent, div.querySelector('dd').textContent])));
/** The embedded model only goes on with texts: as if it had a chat template, or was asked as one that has. */
const chatting = (page) => page.route('**/v1/models', (route) => route.fulfill({ json: { object: 'list', data: [{ id: 'chats', object: 'model', chat_template: true }] } }));
const complete = (url, prompt, max_tokens) =>
  fetch(`${url}v1/completions`, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify({ prompt, max_tokens, temperature: 0 }) }).then((response) => response.json());

test('the cache is shown live, and what others do moves it', { skip }, async () => {
  const server = await start();
  const page = await open(server.url);
  await page.getByText('Live · ').waitFor();
  await page.getByText('128 blocks of 16 tokens').waitFor();
  assert.equal((await figures(page)).evicted, '0');
  const prompt = 'pub fn main() { let vector = Vec::new(); '.repeat(4);
  const answers = await Promise.all(Array.from({ length: 4 }, (_, i) => complete(server.url, `${prompt}${i}`, 60)));
  assert.ok(answers.every((answer) => answer.usage.completion_tokens > 0), JSON.stringify(answers));
  await complete(server.url, `${prompt}0`, 20);
  await page.waitForFunction(() => {
    const { running, waiting, found } = Object.fromEntries([...document.querySelectorAll('dl div')].map((div) => [div.querySelector('dt').textContent, div.querySelector('dd').textContent]));
    const cached = document.querySelectorAll('.map footer b')[1].textContent;
    return running === '0' && waiting === '0' && parseInt(found, 10) > 5 && Number(cached) > 3;
  });
  // The same by the server's own count.
  const metrics = await (await fetch(`${server.url}metrics`)).text();
  const metric = (name) => Number(new RegExp(`^${name}(?:\\{.*\\})? ([\\d.e+]+)$`, 'm').exec(metrics)?.[1]);
  const share = metric('vllm:prefix_cache_hits_total') / metric('vllm:prefix_cache_queries_total');
  const told = { found: `${(share * 100).toFixed(0)}%`, evicted: metric('kvist_blocks_evicted_total').toLocaleString('en-US') };
  // The last lines may come a moment later.
  let shown;
  for (let i = 0; i < 50 && (shown?.found !== told.found || shown.evicted !== told.evicted); i++) {
    await pass(page, 100);
    shown = await figures(page);
  }
  assert.deepEqual({ found: shown.found, evicted: shown.evicted }, told);
  assert.deepEqual(page.errors, []);
  assert.deepEqual(page.foreign, []);
  await page.context().close();
  await server.stop();
});

test('the program has the page that is tested', { skip }, async () => {
  const server = await start();
  for (const file of ['index.html', 'assets/app.js', 'assets/index.css', 'example.jsonl.gz']) {
    const served = Buffer.from(await (await fetch(server.url + (file === 'index.html' ? '' : file))).arrayBuffer());
    assert.ok(served.equals(await readFile(join(BUNDLE, file))), `${file} is not the bundle's: build the program again`);
  }
  await server.stop();
});

test('what was said is answered in a fork, and leaving the page ends its sessions', { skip }, async () => {
  const server = await start();
  const page = await open(server.url);
  await page.getByText('Live · ').waitFor();
  await chatting(page);
  // The first question whether there are sessions gets lost: that is no answer.
  let lost = 0;
  await page.route('**/v1/sessions', (route) => (lost++ === 0 ? route.fulfill({ status: 503, body: '' }) : route.continue()));
  await page.getByRole('button', { name: 'Playground' }).click();
  await page.getByRole('spinbutton', { name: 'Tokens at most' }).fill('12');
  await page.waitForFunction(() => document.querySelector('textarea'));
  assert.equal(await page.getByText('This server has no sessions').count(), 0);
  await page.getByRole('textbox', { name: /Message to Branch/ }).fill('What is a slice?');
  await page.keyboard.press('Enter');
  await page.waitForFunction(() => document.querySelector('li.assistant .under .num'));
  const branches = page.locator('section.branch');
  await branches.first().locator('li.user').getByRole('button', { name: '× 3' }).click();
  await page.waitForFunction(() => document.querySelectorAll('section.branch').length === 4);
  assert.equal(await branches.nth(2).locator('li').count(), 1);
  await branches.nth(2).getByRole('button', { name: 'Answer' }).click();
  await branches.nth(2).locator('li.assistant .under .num').waitFor();
  const sessions = async () => (await (await fetch(`${server.url}v1/sessions`)).json()).data.map((session) => session.n_messages).sort();
  assert.deepEqual(await sessions(), [1, 1, 2, 2]);
  await page.unroute('**/v1/sessions');
  await page.reload();
  await page.getByText('Live · ').waitFor();
  for (let i = 0; i < 3000 && (await sessions()).length > 0; i++) await page.waitForTimeout(100);
  assert.deepEqual(await sessions(), []);
  await page.context().close();
  await server.stop();
});

test('chat, fork, talk to all branches, roll back', { skip }, async () => {
  const server = await start();
  const page = await open(server.url);
  await chatting(page);
  await page.getByText('Live · ').waitFor();
  await page.getByRole('button', { name: 'Playground' }).click();
  await page.getByRole('spinbutton', { name: 'Tokens at most' }).fill('24');
  await page.getByRole('textbox', { name: /Message to Branch/ }).fill('Why is a vector contiguous?');
  await page.keyboard.press('Enter');
  const branches = page.locator('section.branch');
  const answer = branches.first().locator('li.assistant .text');
  await page.waitForFunction(() => document.querySelector('li.assistant .under .num'));
  assert.ok((await answer.innerText()).trim().length > 0);
  await branches.first().locator('li.assistant').getByRole('button', { name: '× 3' }).click();
  await page.waitForFunction(() => document.querySelectorAll('section.branch').length === 4);
  assert.equal(await branches.nth(3).locator('li.assistant .text').innerText(), await answer.innerText());
  await page.getByRole('textbox', { name: 'Message to all branches' }).fill('And then?');
  await page.keyboard.press('Enter');
  await page.waitForFunction(() => document.querySelectorAll('li.assistant .under .num').length >= 8);
  // Forks are read once: what the second answer of a branch found is more than nothing.
  assert.match(await branches.nth(2).locator('li.assistant').last().innerText(), /of \d+ found/);
  await branches.nth(1).locator('li').first().getByRole('button', { name: 'Roll back to here' }).click();
  await page.waitForFunction(() => document.querySelectorAll('section.branch')[1].querySelectorAll('li').length === 1);
  assert.equal(await branches.nth(2).locator('li').count(), 4, 'others keep theirs');
  // The server's sessions are what the page shows: four branches, one of them with a single message.
  const sessions = (await (await fetch(`${server.url}v1/sessions`)).json()).data;
  assert.deepEqual(sessions.map((session) => session.n_messages).sort(), [1, 4, 4, 4]);
  assert.equal(sessions.filter((session) => session.parent === null).length, 1);
  await branches.nth(3).getByRole('button', { name: /Close/ }).click();
  assert.equal(await branches.count(), 3);
  assert.deepEqual(page.errors, []);
  await page.context().close();
  await server.stop();
});

// The two minutes of the README: the embedded model had answered before one could look, then nothing was drawn; of four
// branches one and a half could be seen, and the buttons below an answer by halves.
test('a text in four branches that are alive at once, and drawn when they rest', { skip }, async () => {
  const server = await start();
  const page = await open(server.url, { viewport: { width: 1400, height: 900 } });
  await page.getByText('Live · ').waitFor();
  await page.getByRole('button', { name: 'Playground' }).click();
  const pace = page.getByRole('combobox', { name: 'Pace' });
  const begin = page.getByRole('button', { name: 'The borrow checker' });
  await begin.waitFor();
  assert.equal(await pace.locator('option:checked').innerText(), '10 tokens/s', 'slow enough to be watched');
  await pace.selectOption('as fast as it goes');
  await page.getByRole('spinbutton', { name: 'Tokens at most' }).fill('40');
  await begin.click();
  const branches = page.locator('section.branch');
  const fork = branches.first().locator('li.assistant').getByRole('button', { name: '× 3' });
  await fork.waitFor();
  await fork.click();
  await page.waitForFunction(() => document.querySelectorAll('section.branch').length === 4);
  await pass(page, 100);
  for (let i = 0; i < 4; i++) {
    for (const part of [branches.nth(i), branches.nth(i).locator('li.assistant .acts')]) {
      const box = await part.boundingBox();
      assert.ok(box.x >= 0 && box.x + box.width <= 1400 && box.y >= 0 && box.y + box.height <= 900, `branch ${i + 1}: ${JSON.stringify(box)}`);
    }
    const [list, acts] = [await branches.nth(i).locator('ol').boundingBox(), await branches.nth(i).locator('li.assistant .acts').boundingBox()];
    assert.ok(acts.y + acts.height <= list.y + list.height, `the buttons of branch ${i + 1}`);
  }
  // At three tokens a second they are alive for five minutes.
  await pace.selectOption('3 tokens/s');
  await page.getByRole('spinbutton', { name: 'Tokens at most' }).fill('1000');
  await page.getByRole('button', { name: 'Let all go on' }).click();
  const sharing = page.getByRole('region', { name: 'Shared blocks' });
  await sharing.getByText('4 live sequences').waitFor();
  assert.match(await sharing.locator('.saved').innerText(), /sharing saves \d+ blocks/);
  for (const name of ['Branch 1', 'Branch 2', 'Branch 3', 'Branch 4']) await sharing.locator('svg').getByText(name, { exact: true }).waitFor();
  for (let i = 0; i < 4; i++) await branches.nth(i).getByRole('button', { name: 'Stop' }).click();
  await sharing.getByText('0 live sequences, 4 at rest').waitFor();
  assert.match(await sharing.locator('.saved').innerText(), /sharing saves \d+ blocks/);
  // The page has all of what they have, also what was written before the server knew of Stop.
  await page.waitForFunction(() => !document.querySelector('.branches').textContent.includes('writing …'));
  const shown = await branches.evaluateAll((all) => all.map((branch) => [...branch.querySelectorAll('li .text')].map((text) => text.textContent).join('')));
  const ids = (await (await fetch(`${server.url}v1/sessions`)).json()).data.map((session) => session.id);
  const texts = await Promise.all(ids.map(async (id) => (await (await fetch(`${server.url}v1/sessions/${id}`)).json()).text));
  assert.deepEqual(shown.sort(), texts.sort());
  // What they share is a piece of its own, to which one can go back.
  await branches.nth(3).locator('li').nth(1).getByRole('button', { name: 'Roll back to here' }).click();
  await page.waitForFunction(() => document.querySelectorAll('section.branch')[3].querySelectorAll('li').length === 2);
  assert.equal(await branches.nth(1).locator('li').count(), 3, 'others keep theirs');
  const sessions = (await (await fetch(`${server.url}v1/sessions`)).json()).data;
  const tokens = sessions.map((session) => session.n_tokens).sort((a, b) => a - b);
  assert.ok(tokens.length === 4 && tokens[0] < tokens[1], `one is shorter than the others: ${tokens}`);
  assert.deepEqual(page.errors, []);
  await page.context().close();
  await server.stop();
});

test('with API keys: asked for, and kept for this tab alone', { skip }, async () => {
  const file = join(await mkdtemp(join(tmpdir(), 'kvist-')), 'kvist.toml');
  await writeFile(file, '[[keys]]\nname = "ops"\nkey = "ops-secret"\nadmin = true\n[[keys]]\nname = "ann"\nkey = "ann-secret"\n');
  const server = await start('--config', file);
  const page = await open(server.url);
  await page.getByText('The server wants an admin key').waitFor();
  await page.getByText('Recording · Example').waitFor();
  const field = page.getByLabel('API key', { exact: true }).and(page.locator('input'));
  await field.fill('somebody-elses');
  await page.getByRole('button', { name: 'Connect' }).click();
  await page.getByText('It does not know this one.').waitFor();
  await field.fill('ann-secret');
  await page.getByRole('button', { name: 'Connect' }).click();
  await page.getByText('it is not an admin key').waitFor();
  await page.getByRole('button', { name: 'Another key' }).click();
  await field.fill('ops-secret');
  await page.getByRole('button', { name: 'Connect' }).click();
  await page.getByText('Live · ').waitFor();
  assert.equal(await page.evaluate(() => Object.values(localStorage).join()), '');
  await page.context().close();
  await server.stop();
});

test('a server that goes and comes back', { skip }, async () => {
  const first = await start();
  const page = await open(first.url);
  await page.getByText('Live · ').waitFor();
  await first.stop();
  await page.getByText('Connection lost').waitFor();
  const second = await start('--port', new URL(first.url).port).catch(() => null);
  assert.ok(second, 'the port is free again');
  await page.getByText('Live · ').waitFor();
  await complete(second.url, 'pub fn main() {', 16);
  await page.waitForFunction(() => document.querySelector('[aria-label="Memory, blocks"] b')?.textContent !== '–');
  await page.context().close();
  await second.stop();
});
