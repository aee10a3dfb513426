// The parts of the server's API that the playground uses. Errors have the server's message.
import { app } from './app.svelte.js';
import { eventsOf, messageOf, withKey } from './stream.js';

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function call(method, path, body, options = {}) {
  const headers = withKey(app.key, body === undefined ? {} : { 'content-type': 'application/json' });
  const response = await fetch(path, { ...options, method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  if (response.ok) return response;
  throw new Refused(response.status, await messageOf(response));
}

export const get = async (path) => (await call('GET', path)).json();
export const post = async (path, body = {}) => (await call('POST', path, body)).json();
/** With `keepalive` the request is sent even while the page is being closed. */
export const remove = (path, keepalive = false) => call('DELETE', path, undefined, { keepalive });

/** The text of a streamed answer, piece by piece, with the usage if the server reports it. */
export async function* generate(path, body, signal) {
  const response = await call('POST', path, { ...body, stream: true }, { signal });
  for await (const { event, data } of eventsOf(response.body)) {
    if (data === '[DONE]') return;
    const chunk = JSON.parse(data);
    if (event === 'error' || chunk.error) throw new Refused(500, chunk.error?.message ?? 'the answer broke off');
    const choice = chunk.choices?.[0];
    yield { text: choice?.delta?.content ?? choice?.text ?? '', usage: chunk.usage ?? null, finish: choice?.finish_reason ?? null };
  }
}
