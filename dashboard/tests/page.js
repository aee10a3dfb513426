// A browser, and a server of the built bundle that says what `kvist serve` says in its headers.
import { createServer } from 'node:http';
import { readFile } from 'node:fs/promises';
import { existsSync } from 'node:fs';
import { extname, join, normalize } from 'node:path';
import { fileURLToPath } from 'node:url';
import { chromium } from 'playwright-core';

export const BUNDLE = process.env.KVIST_BUNDLE ?? fileURLToPath(new URL('../../crates/server/dashboard/', import.meta.url));
const TYPES = { '.html': 'text/html; charset=utf-8', '.js': 'text/javascript', '.css': 'text/css', '.svg': 'image/svg+xml', '.gz': 'application/gzip' };
/** The same words as in crates/server/src/dashboard.rs. */
export const POLICY =
  "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/** Serves the bundle; `routes` maps paths to handlers that come first. */
export async function serve(routes = {}) {
  const server = createServer(async (request, response) => {
    const path = new URL(request.url, 'http://localhost').pathname;
    if (routes[path]) return routes[path](request, response);
    const file = join(BUNDLE, normalize(path === '/' ? '/index.html' : path));
    try {
      const bytes = await readFile(file);
      response.writeHead(200, { 'content-type': TYPES[extname(file)] ?? 'application/octet-stream', 'content-security-policy': POLICY });
      response.end(bytes);
    } catch {
      response.writeHead(404).end();
    }
  });
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
  return { url: `http://127.0.0.1:${server.address().port}/`, close: () => (server.closeAllConnections(), server.close()) };
}

export const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? ['/usr/bin/chromium', '/usr/bin/chromium-browser', '/usr/bin/google-chrome'].find(existsSync),
  args: ['--no-sandbox', '--disable-gpu'],
});

/** In the page: every canvas counts in `calls` what is drawn on it, and `seenFrames` are all frames. Each drawing begins with one `clearRect`. */
function counting() {
  window.seenFrames = 0;
  const count = () => {
    window.seenFrames += 1;
    requestAnimationFrame(count);
  };
  requestAnimationFrame(count);
  for (const name of ['clearRect', 'putImageData', 'fill', 'stroke']) {
    const real = CanvasRenderingContext2D.prototype[name];
    CanvasRenderingContext2D.prototype[name] = function (...args) {
      this.canvas.calls ??= {};
      this.canvas.calls[name] = (this.canvas.calls[name] ?? 0) + 1;
      return real.apply(this, args);
    };
  }
}
/** What was drawn so far on `canvas`. */
export const calls = (canvas) => canvas.evaluate((element) => ({ clearRect: 0, putImageData: 0, fill: 0, stroke: 0, ...element.calls }));

/** Number of frames so far. */
export const frames = (page) => page.evaluate(() => window.seenFrames);

/** Lets `ms` pass by the page's own clock, and then two frames: what was to be drawn has been. */
export const pass = (page, ms = 0) => page.evaluate((ms) => new Promise((resolve) => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(resolve)), ms)), ms);

/** A page that remembers what went wrong. A stream that is not there is answered 404, and told by the browser: no error. */
export async function open(url, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1440, height: 1000 }, ...options });
  // A busy machine is slow: what never comes ends the test, and what comes late does not.
  context.setDefaultTimeout(300000);
  const page = await context.newPage();
  await page.addInitScript(counting);
  page.errors = [];
  page.on('console', (message) => {
    if (['error', 'warning'].includes(message.type()) && !message.location().url.endsWith('/kvist/live')) page.errors.push(`${message.text()} ${message.location().url}`);
  });
  page.on('pageerror', (error) => page.errors.push(String(error.stack)));
  page.foreign = [];
  page.on('request', (request) => {
    if (!request.url().startsWith(url)) page.foreign.push(request.url());
  });
  await page.goto(url);
  return page;
}
