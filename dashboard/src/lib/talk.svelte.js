// Conversations side by side, as the playground holds them.
//
// A branch is a list of messages. Where the server has sessions, each branch is one: forking shares its blocks, rolling
// back gives them up. Where it has none, branches are lists that are sent whole, and share blocks by their prefixes.
import * as api from './api.js';

let next = 1;

export class Branch {
  name = $state('');
  /** `{ role, content, usage }`, as many as the session has. */
  messages = $state([]);
  busy = $state(false);
  error = $state('');
  draft = $state('');
  id = null;
  stopper = null;

  constructor(name, messages = [], id = null) {
    this.name = name;
    this.messages = messages;
    this.id = id;
  }
}

export class Talk {
  branches = $state([]);
  /** Whether the server has sessions; null until it was asked. */
  sessions = $state(null);
  temperature = $state(0.7);
  maxTokens = $state(200);

  constructor() {
    this.branches = [new Branch(`Branch ${next++}`)];
  }

  async probe() {
    if (this.sessions !== null) return;
    try {
      await api.get('v1/sessions');
      this.sessions = true;
    } catch (error) {
      // Anything else may go over: it is asked again.
      if (error.status === 404 || error.status === 405) this.sessions = false;
    }
  }

  /** The session of `branch`, if the server has sessions, with all of its messages; `more` are those it does not have yet. */
  async #session(branch, more) {
    await this.probe();
    if (!this.sessions) return null;
    if (branch.id === null) {
      branch.id = (await api.post('v1/sessions')).id;
      more = branch.messages;
    }
    const messages = more.map(({ role, content }) => ({ role, content }));
    if (messages.length > 0) await api.post(`v1/sessions/${branch.id}/append`, { messages });
    return branch.id;
  }

  /** What the session really has, behind an answer that broke off. */
  async #resync(branch) {
    if (branch.id === null) return;
    const { messages } = await api.get(`v1/sessions/${branch.id}`);
    if (messages) branch.messages = messages.map(({ message }) => ({ role: message.role, content: message.content, usage: null }));
  }

  async send(branch, text) {
    if (branch.busy || !text.trim()) return;
    branch.draft = '';
    branch.messages.push({ role: 'user', content: text, usage: null });
    await this.#goOn(branch, branch.messages.slice(-1));
  }

  /** An answer to what was said last: of a branch that was forked there. */
  async answer(branch) {
    if (!branch.busy) await this.#goOn(branch, []);
  }

  async #goOn(branch, more) {
    branch.error = '';
    branch.busy = true;
    branch.stopper = new AbortController();
    try {
      await this.#answer(branch, await this.#session(branch, more));
    } catch (error) {
      if (error.name !== 'AbortError') branch.error = error.message;
      // An answer that never began was not given.
      if (branch.messages.at(-1).role === 'assistant' && !branch.messages.at(-1).content) branch.messages.pop();
      await this.#resync(branch).catch(() => {}); // it has been told that something is wrong
    } finally {
      branch.busy = false;
      branch.stopper = null;
    }
  }

  async #answer(branch, id) {
    const options = { max_tokens: this.maxTokens, temperature: this.temperature, stream_options: { include_usage: true } };
    const said = branch.messages.map(({ role, content }) => ({ role, content }));
    branch.messages.push({ role: 'assistant', content: '', usage: null });
    const answer = branch.messages.at(-1); // the reactive one
    const { signal } = branch.stopper;
    const stream = id === null
      ? api.generate('v1/chat/completions', { ...options, messages: said }, signal)
      : api.generate(`v1/sessions/${id}/generate`, options, signal);
    for await (const { text, usage } of stream) {
      answer.content += text;
      if (usage) answer.usage = usage;
    }
  }

  stop(branch) {
    branch.stopper?.abort();
  }

  /** `n` more branches that begin with the messages up to `i`, `i` included. */
  async fork(branch, i, n = 1) {
    branch.error = '';
    const copy = () => branch.messages.slice(0, i + 1).map((message) => ({ ...message }));
    try {
      let ids = new Array(n).fill(null);
      if (branch.id !== null) {
        const made = await api.post(`v1/sessions/${branch.id}/fork`, { n, at: { message: i + 1 } });
        ids = made.sessions.map((session) => session.id);
      }
      const place = this.branches.indexOf(branch) + 1;
      this.branches.splice(place, 0, ...ids.map((id) => new Branch(`Branch ${next++}`, copy(), id)));
    } catch (error) {
      branch.error = error.message;
    }
  }

  /** Take back everything behind message `i`. */
  async rollback(branch, i) {
    branch.error = '';
    try {
      if (branch.id !== null) {
        await api.post(`v1/sessions/${branch.id}/rollback`, { to: { message: i + 1 } });
      }
      branch.messages.length = i + 1;
    } catch (error) {
      branch.error = error.message;
    }
  }

  async close(branch) {
    this.stop(branch);
    if (branch.id !== null) api.remove(`v1/sessions/${branch.id}`).catch((error) => (branch.error = error.message));
    this.branches = this.branches.filter((other) => other !== branch);
    if (this.branches.length === 0) this.branches = [new Branch(`Branch ${next++}`)];
  }

  /** The page is left, and with it goes what nobody could find again. */
  leave() {
    for (const { id } of this.branches) if (id !== null) api.remove(`v1/sessions/${id}`, true).catch(() => {}); // nobody is there to be told
  }
}

/** One for the page: it survives looking at the cache. */
export const talk = new Talk();
addEventListener('pagehide', (event) => event.persisted || talk.leave());
