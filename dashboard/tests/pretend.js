// A server that only pretends: the bundle, and a live stream that says what a test wants it to.
import { serve } from './page.js';

/** `tell` sends lines to all listeners, the other `tell…` other events; `restart` ends the streams and begins anew, `refuse` answers with an error instead. */
export async function pretend(snapshot) {
  let listeners = new Set();
  let refusal = null;
  const event = (name, data) => `event: ${name}\ndata: ${data.replaceAll('\n', '\ndata: ')}\n\n`;
  const server = await serve({
    '/kvist/live': (_, response) => {
      if (refusal) {
        response.writeHead(refusal.status, { 'content-type': 'application/json' });
        return response.end(JSON.stringify({ error: { message: refusal.message } }));
      }
      response.writeHead(200, { 'content-type': 'text/event-stream' });
      response.write(event('snapshot', JSON.stringify(typeof snapshot === 'function' ? snapshot() : snapshot)));
      listeners.add(response);
      response.on('close', () => listeners.delete(response));
    },
  });
  return {
    ...server,
    get listeners() {
      return listeners.size;
    },
    tell: (lines) => listeners.forEach((response) => response.write(event('lines', lines.map((line) => JSON.stringify(line)).join('\n')))),
    tellSessions: (sessions, more = 0) => listeners.forEach((response) => response.write(event('sessions', JSON.stringify({ sessions, more })))),
    tellTiers: (tiers) => listeners.forEach((response) => response.write(event('tiers', JSON.stringify(tiers)))),
    tellBelow: (below) => listeners.forEach((response) => response.write(event('below', JSON.stringify(below)))),
    restart(next) {
      snapshot = next;
      listeners.forEach((response) => response.end());
    },
    refuse: (status, message) => (refusal = status === null ? null : { status, message }),
  };
}
