// Pictures to look at: node tests/shots.js FOLDER. With a program in $KVIST, of a playground with four branches too.
import { program, start } from './kvist.js';
import { browser, open, serve } from './page.js';

const folder = process.argv[2] ?? 'shots';
const server = await serve();
for (const [name, options, act] of [
  ['light', { colorScheme: 'light', viewport: { width: 1440, height: 1480 } }],
  ['dark', { colorScheme: 'dark', viewport: { width: 1440, height: 1480 } }],
  ['narrow', { viewport: { width: 375, height: 812 }, colorScheme: 'light' }],
  ['tour', { colorScheme: 'dark' }, async (page) => {
    await page.getByRole('button', { name: 'Tour' }).click();
    for (let i = 0; i < 3; i++) await page.getByRole('button', { name: 'Next' }).click();
    await page.waitForTimeout(800);
  }],
]) {
  const page = await open(server.url, { deviceScaleFactor: 1, ...options });
  await page.waitForSelector('canvas');
  await page.waitForTimeout(700);
  await act?.(page);
  await page.screenshot({ path: `${folder}/${name}.png`, fullPage: name === 'narrow' });
  if (page.errors.length > 0) console.log(name, page.errors);
  await page.context().close();
}
server.close();
if (program !== undefined) {
  const live = await start();
  for (const [name, options] of [
    ['branches-light', { colorScheme: 'light', viewport: { width: 1440, height: 1000 } }],
    ['branches-dark', { colorScheme: 'dark', viewport: { width: 1440, height: 1000 } }],
    ['branches-narrow', { colorScheme: 'light', viewport: { width: 375, height: 812 } }],
  ]) {
    const page = await open(live.url, { deviceScaleFactor: 1, ...options });
    await page.getByRole('button', { name: 'Playground' }).click();
    await page.getByRole('combobox', { name: 'Pace' }).selectOption('as fast as it goes');
    await page.getByRole('spinbutton', { name: 'Tokens at most' }).fill('40');
    await page.getByRole('button', { name: 'The borrow checker' }).click();
    await page.locator('section.branch li.assistant').getByRole('button', { name: '× 3' }).click();
    await page.waitForFunction(() => document.querySelectorAll('section.branch').length === 4);
    await page.getByRole('button', { name: 'Let all go on' }).click();
    await page.waitForTimeout(1500);
    await page.screenshot({ path: `${folder}/${name}.png`, fullPage: name === 'branches-narrow' });
    if (page.errors.length > 0) console.log(name, page.errors);
    await page.context().close();
  }
  await live.stop();
}
await browser.close();
