// What the page needs of HTTP: headers with its key, event streams, and errors in the server's words.
import { CLOCK } from './clock.js';

/** A server sends something on an event stream every 15 s, if only a comment. */
const SILENCE_MS = 45_000;

/** The key cannot be sent. */
export class BadKey extends Error {}

/** `headers`, with the key if there is one. */
export function withKey(key, headers = {}) {
  if (!key) return headers;
  // Browsers refuse other characters in a header.
  if (/[^\t\x20-\x7e\xa0-\xff]/.test(key)) throw new BadKey('the API key has characters that HTTP cannot send: keys are of Latin letters, digits and signs');
  return { ...headers, authorization: `Bearer ${key}` };
}

/** Reads from `reader`. Fails if nothing comes for `SILENCE_MS`. */
async function read(reader, clock) {
  let timer;
  const silence = new Promise((_, reject) => {
    timer = clock.setTimeout(() => reject(new Error(`nothing came for ${SILENCE_MS / 1000} s`)), SILENCE_MS);
  });
  try {
    return await Promise.race([reader.read(), silence]);
  } finally {
    clock.clearTimeout(timer);
  }
}

/** The events of a text/event-stream body, as `{ event, data }`. Fails if the connection is dead. */
export async function* eventsOf(body, clock = CLOCK) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  let event = 'message';
  let data = [];
  try {
    for (;;) {
      const { value, done } = await read(reader, clock);
      if (done) return;
      text += value;
      let from = 0;
      for (let to; (to = text.indexOf('\n', from)) >= 0; from = to + 1) {
        const line = text.slice(from, to).replace(/\r$/, '');
        if (line === '') {
          if (data.length > 0) yield { event, data: data.join('\n') };
          event = 'message';
          data = [];
        } else if (line.startsWith('event:')) event = line.slice(6).trim();
        else if (line.startsWith('data:')) data.push(line.slice(5).replace(/^ /, ''));
      }
      text = text.slice(from);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The server's message in an error response. */
export async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `status ${response.status}`; // the body is not in the format of errors: report the status
  }
}
