// What a frame of a large live cache costs: node tests/frames.js [BLOCKS] [SECONDS]. It only prints.
import { browser, open } from './page.js';
import { Load } from './load.js';
import { pretend } from './pretend.js';

const blocks = Number(process.argv[2] ?? 100_000);
const seconds = Number(process.argv[3] ?? 10);
const load = new Load({ blocks, running: Math.min(256, Math.floor(blocks / 400)) });
const server = await pretend(() => load.snapshot());
const page = await open(server.url);
await page.getByText('Live · ').waitFor();
let touched = 0;
const timer = setInterval(() => {
  const lines = load.turn();
  for (const line of lines) touched += line.blocks?.length ?? 0;
  server.tell(lines);
}, 100);
await page.waitForTimeout(3000);
const session = await page.context().newCDPSession(page);
await session.send('Performance.enable');
const metrics = async () => Object.fromEntries((await session.send('Performance.getMetrics')).metrics.map(({ name, value }) => [name, value]));
touched = 0;
const before = await metrics();
// Frames as the browser gives them: one that takes too long makes the next one late.
const frames = await page.evaluate(async (ms) => {
  const begun = performance.now();
  const all = [];
  for (let last = begun; last - begun < ms; ) {
    const now = await new Promise((resolve) => requestAnimationFrame(() => resolve(performance.now())));
    all.push(now - last);
    last = now;
  }
  return all.slice(1).sort((a, b) => a - b);
}, seconds * 1000);
const after = await metrics();
clearInterval(timer);
const at = (share) => `${frames[Math.min(frames.length - 1, Math.floor(frames.length * share))].toFixed(1)} ms`;
console.log(`${blocks} blocks, ${load.sequences.length} sequences, 10 turns/s, ${Math.round(touched / seconds)} blocks touched/s, ${seconds} s`);
console.log(`frames: median ${at(0.5)}, 90 % within ${at(0.9)}, 99 % within ${at(0.99)}, longest ${at(1)}`);
console.log(`main thread: ${(((after.TaskDuration - before.TaskDuration) / seconds) * 100).toFixed(0)} % busy, of it scripts ${(((after.ScriptDuration - before.ScriptDuration) / seconds) * 100).toFixed(0)} %`);
if (page.errors.length > 0) console.log(page.errors);
await page.context().close();
server.close();
await browser.close();
