// Conversations, or texts, side by side, as the playground holds them.
//
// A branch is a list of pieces. Where the model has a chat template, they are messages of a chat; where it has none, it goes
// on with a text, and pieces are what was typed and what was generated. Where the server has sessions, each branch is one:
// forking shares its blocks, rolling back gives them up. Where it has none, branches are lists that are sent whole, and share
// blocks by their prefixes.
import * as api from './api.js';

let next = 1;

export class Branch {
  name = $state('');
  /** `{ role, content, usage, ends, open }`: of a text, `ends` is how many tokens there are up to here; an `open` one was cut. */
  messages = $state([]);
  busy = $state(false);
  error = $state('');
  draft = $state('');
  id = $state(null);
  stopper = null;

  constructor(name, messages = [], id = null) {
    this.name = name;
    this.messages = messages;
    this.id = id;
  }
}

const piece = (role, content, more = {}) => ({ role, content, usage: null, ends: null, open: false, ...more });

export class Talk {
  branches = $state([]);
  /** Whether the server has sessions; null until it was asked. */
  sessions = $state(null);
  /** Whether the model answers in a chat, or goes on with a text; null until the server was asked. */
  chats = $state(null);
  temperature = $state(0.7);
  maxTokens = $state(200);
  /** Tokens per second, to be watched; null: as fast as it goes. */
  pace = $state(null);
  /** Why `chats` is null. */
  #untold = '';

  constructor() {
    this.branches = [new Branch(`Branch ${next++}`)];
  }

  async probe() {
    await Promise.all([this.#probeSessions(), this.#probeModel()]);
  }
  async #probeSessions() {
    if (this.sessions !== null) return;
    try {
      await api.get('v1/sessions');
      this.sessions = true;
    } catch (error) {
      // Anything else may go over: it is asked again.
      if (error.status === 404 || error.status === 405) this.sessions = false;
    }
  }
  async #probeModel() {
    if (this.chats !== null) return;
    try {
      const [model] = (await api.get('v1/models')).data;
      this.chats = model.chat_template !== false;
      // A model that only goes on with texts is small, and has answered before anybody could look.
      if (!this.chats) this.pace = 10;
    } catch (error) {
      this.#untold = error.message; // it is asked again
    }
  }
  /** A session that began as a text stays one: without knowing which it is to be, nothing is sent. */
  async #ready(branch) {
    await this.probe();
    if (this.chats === null) branch.error = `The server did not say which model it has: ${this.#untold}`;
    return this.chats !== null && !branch.busy;
  }

  /** The session of `branch`, if the server has sessions, with all of its pieces; `more` are those it does not have yet. */
  async #session(branch, more) {
    await this.probe();
    if (!this.sessions) return null;
    if (branch.id !== null) {
      await this.#append(branch.id, more);
      return branch.id;
    }
    const { id } = await api.post('v1/sessions');
    try {
      await this.#append(id, branch.messages);
      branch.stopper.signal.throwIfAborted();
    } catch (error) {
      // The next one gets all pieces again.
      api.remove(`v1/sessions/${id}`).catch(() => {}); // it expires
      throw error;
    }
    // For this session every answer is a whole one.
    if (this.chats) branch.messages.at(-1).open = false;
    return (branch.id = id);
  }
  /** Of a text piece by piece, so that it can be cut behind each of them. */
  async #append(id, pieces) {
    const path = `v1/sessions/${id}/append`;
    if (this.chats) {
      if (pieces.length > 0) await api.post(path, { messages: pieces.map(({ role, content }) => ({ role, content })) });
      return;
    }
    let ends = 0;
    for (const one of pieces) {
      if (one.content) ends = (await api.post(path, { text: one.content })).n_tokens;
      one.ends = ends;
    }
  }

  /** What the session really has, behind an answer that broke off: of a text the last piece is what lies behind the others.
   *  Returns whether there is a session. */
  async #resync(branch) {
    let seen;
    // It is still written to until the server finds that the stream was closed.
    while (branch.id !== null && (seen = await api.get(`v1/sessions/${branch.id}`)).running) await new Promise((resolve) => setTimeout(resolve, 100));
    if (branch.id === null) return false;
    const { messages, text, n_tokens } = seen;
    if (messages) branch.messages = messages.map(({ message, open }) => piece(message.role, message.content, { open }));
    else if (branch.messages.length > 0) {
      const before = branch.messages.slice(0, -1).map(({ content }) => content).join('');
      // A tokenizer may write a text otherwise than it was typed: then it is one piece.
      if (!text.startsWith(before)) branch.messages = [piece('assistant', text)];
      else branch.messages.at(-1).content = text.slice(before.length);
      branch.messages.at(-1).ends = n_tokens;
      if (!branch.messages.at(-1).content) branch.messages.pop();
    }
    return true;
  }

  async send(branch, text) {
    if (branch.busy || !text.trim() || !(await this.#ready(branch))) return;
    branch.draft = '';
    // What is answered does not go on any more.
    if (branch.messages.length > 0) branch.messages.at(-1).open = false;
    // Of a text, a word begins behind a space.
    const last = branch.messages.at(-1)?.content;
    if (!this.chats && last && !/\s$/.test(last) && /^\w/.test(text)) text = ` ${text}`;
    branch.messages.push(piece('user', text));
    await this.#goOn(branch, branch.messages.slice(-1));
  }

  /** An answer to what was said last, or more of one that was cut, or more of the text. */
  async answer(branch) {
    if (!branch.busy && (await this.#ready(branch))) await this.#goOn(branch, []);
  }

  /** Is there something to go on with, without a new message? */
  canGoOn(branch) {
    const last = branch.messages.at(-1);
    return !branch.busy && last !== undefined && (this.chats === false || last.role === 'user' || last.open);
  }

  async #goOn(branch, more) {
    branch.error = '';
    branch.busy = true;
    branch.stopper = new AbortController();
    const said = more.map(({ content }) => content).join('');
    let given = false;
    try {
      const id = await this.#session(branch, more);
      given = true;
      await this.#answer(branch, id);
    } catch (error) {
      if (error.name !== 'AbortError') branch.error = error.message;
      // What the session did not get can be sent again; an answer that never began was not given.
      const unsent = branch.id !== null && !given;
      if (unsent) branch.draft ||= said;
      const synced = await this.#resync(branch).catch(() => false); // it has been told that something is wrong
      const last = branch.messages.at(-1);
      if (!synced && ((unsent && said) || (last.role === 'assistant' && !last.content))) branch.messages.pop();
    } finally {
      branch.busy = false;
      branch.stopper = null;
    }
  }

  async #answer(branch, id) {
    const options = { max_tokens: this.maxTokens, temperature: this.temperature, stream_options: { include_usage: true } };
    if (this.pace) options.kvist = { pace: this.pace };
    const said = branch.messages.map(({ role, content }) => ({ role, content }));
    // An answer that was cut is one message with what follows; of a text, what is shared stays a piece of its own.
    if (!(this.chats && id !== null && branch.messages.at(-1).open)) branch.messages.push(piece('assistant', ''));
    const answer = branch.messages.at(-1); // the reactive one
    const { signal } = branch.stopper;
    const stream = id !== null
      ? api.generate(`v1/sessions/${id}/generate`, options, signal)
      : this.chats
        ? api.generate('v1/chat/completions', { ...options, messages: said }, signal)
        : api.generate('v1/completions', { ...options, prompt: said.map(({ content }) => content).join('') }, signal);
    answer.open = true;
    for await (const { text, usage, finish } of stream) {
      answer.content += text;
      if (usage) answer.usage = usage;
      if (finish) answer.open = finish === 'length';
    }
    if (id !== null && !this.chats) answer.ends = (await api.get(`v1/sessions/${id}`)).n_tokens;
  }

  stop(branch) {
    branch.stopper?.abort();
  }

  /** Where a session is cut so that piece `i` is its last. */
  #place(branch, i) {
    return this.chats ? { message: i + 1 } : branch.messages[i].ends;
  }

  /** `n` more branches that begin with the pieces up to `i`, `i` included. */
  async fork(branch, i, n = 1) {
    branch.error = '';
    const copy = () => branch.messages.slice(0, i + 1).map((message) => ({ ...message }));
    try {
      let ids = new Array(n).fill(null);
      if (branch.id !== null) {
        const made = await api.post(`v1/sessions/${branch.id}/fork`, { n, at: this.#place(branch, i) });
        ids = made.sessions.map((session) => session.id);
      }
      const place = this.branches.indexOf(branch) + 1;
      this.branches.splice(place, 0, ...ids.map((id) => new Branch(`Branch ${next++}`, copy(), id)));
    } catch (error) {
      branch.error = error.message;
    }
  }

  /** Take back everything behind piece `i`. */
  async rollback(branch, i) {
    branch.error = '';
    try {
      if (branch.id !== null) {
        await api.post(`v1/sessions/${branch.id}/rollback`, { to: this.#place(branch, i) });
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

  /** Another key does not have the sessions of this one: what was said is given to new ones, when it goes on. */
  forget() {
    for (const branch of this.branches) this.stop(branch);
    this.leave();
    for (const branch of this.branches) branch.id = null;
  }

  /** The page is left, and with it goes what nobody could find again. */
  leave() {
    for (const { id } of this.branches) if (id !== null) api.remove(`v1/sessions/${id}`, true).catch(() => {}); // nobody is there to be told
  }
}

/** One for the page: it survives looking at the cache. */
export const talk = new Talk();
addEventListener('pagehide', (event) => event.persisted || talk.leave());
