// Pictures to look at: node tests/shots.js FOLDER
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
await browser.close();
