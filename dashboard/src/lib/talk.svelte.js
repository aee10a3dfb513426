// The conversations, or texts, of the playground, side by side.
//
// A branch is a list of pieces. If the model has a chat template, they are the messages of a chat. If it has none, the model
// continues a text, and the pieces are what was typed and what was generated. If the server has sessions, each branch is a
// session: a fork shares its blocks, a rollback releases them. Otherwise every request sends the whole branch, and branches
// share blocks through the prefix index.
import * as api from './api.js';
import { Slots } from './slots.js';

/** Browsers open six connections to a server over HTTP/1.1. The live stream takes one of them. */
const MOST_ANSWERS = 5;

let next = 1;

export class Branch {
  name = $state('');
  /** `{ role, content, usage, ends, open }`. `ends`: in a text, the number of tokens up to the end of this piece. `open`: the
   *  answer was cut off and can be continued. */
  messages = $state([]);
  busy = $state(false);
  /** Its answer waits until another one has ended. */
  waits = $state(false);
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

/** Removes an answer that never started. */
function dropEmptyAnswer(branch) {
  const last = branch.messages.at(-1);
  if (last?.role === 'assistant' && !last.content) branch.messages.pop();
}

const piece = (role, content, more = {}) => ({ role, content, usage: null, ends: null, open: false, ...more });

export class Talk {
  branches = $state([]);
  /** Whether the server has sessions; null while unknown. */
  sessions = $state(null);
  /** Whether the model answers in a chat (true) or continues a text (false); null while unknown. */
  chats = $state(null);
  temperature = $state(0.7);
  maxTokens = $state(200);
  /** Limit in tokens per second, for watching; null: no limit. */
  pace = $state(null);
  /** The error because of which `chats` is null. */
  #untold = '';
  #answers = new Slots(MOST_ANSWERS);

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
      // Other errors may be temporary: ask again next time.
      if (error.status === 404 || error.status === 405) this.sessions = false;
    }
  }
  async #probeModel() {
    if (this.chats !== null) return;
    try {
      const [model] = (await api.get('v1/models')).data;
      this.chats = model.chat_template !== false;
      // A model that only continues texts is small, and too fast to watch.
      if (!this.chats) this.pace = 10;
    } catch (error) {
      this.#untold = error.message; // ask again next time
    }
  }
  /** Whether `branch` can send. A session is a chat or a text for good, so nothing is sent until the model's type is known. */
  async #ready(branch) {
    await this.probe();
    if (this.chats === null) branch.error = `The server did not say which model it has: ${this.#untold}`;
    return this.chats !== null && !branch.busy;
  }

  /** The session of `branch`, with all its pieces; `more` are the pieces to append. Null if the server has no sessions. */
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
      // The next attempt makes a new session with all pieces.
      api.remove(`v1/sessions/${id}`).catch(() => {}); // the session expires anyway
      throw error;
    }
    // The new session cannot continue an earlier answer.
    if (this.chats) branch.messages.at(-1).open = false;
    return (branch.id = id);
  }
  /** Appends pieces to a session. A text is sent piece by piece, so that the session can be cut after each of them. */
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

  /** Reads back what the session contains after an answer was interrupted. In a text, the last piece is what follows the
   *  other pieces. Returns whether there is a session. */
  async #resync(branch) {
    let seen;
    // The session is still running until the server notices that the stream was closed.
    while (branch.id !== null && (seen = await api.get(`v1/sessions/${branch.id}`)).running) await new Promise((resolve) => setTimeout(resolve, 100));
    if (branch.id === null) return false;
    const { messages, text, n_tokens } = seen;
    if (messages) branch.messages = messages.map(({ message, open }) => piece(message.role, message.content, { open }));
    else if (branch.messages.length > 0) {
      const before = branch.messages.slice(0, -1).map(({ content }) => content).join('');
      // A tokenizer may change the text. If it did, the text becomes one piece.
      if (!text.startsWith(before)) branch.messages = [piece('assistant', text)];
      else branch.messages.at(-1).content = text.slice(before.length);
      branch.messages.at(-1).ends = n_tokens;
      if (!branch.messages.at(-1).content) branch.messages.pop();
    }
    return true;
  }

  /** Sends `text` as a message, or appends it to the text. Returns false if nothing was sent. */
  async send(branch, text) {
    if (branch.busy || !text.trim() || !(await this.#ready(branch))) return false;
    if (branch.draft === text) branch.draft = '';
    // After a reply, an answer cannot be continued.
    if (branch.messages.length > 0) branch.messages.at(-1).open = false;
    // In a text, put a space before a new word.
    const last = branch.messages.at(-1)?.content;
    if (!this.chats && last && !/\s$/.test(last) && /^\w/.test(text)) text = ` ${text}`;
    branch.messages.push(piece('user', text));
    await this.#goOn(branch, branch.messages.slice(-1));
    return true;
  }

  /** Sends `text` to all branches. One that cannot send now keeps it as a draft. */
  async sendAll(text) {
    const send = async (branch) => {
      if (!(await this.send(branch, text))) branch.draft = branch.draft.trim() ? `${branch.draft}\n${text}` : text;
    };
    await Promise.all(this.branches.map(send));
  }

  /** Generates an answer to the last message, or continues an answer that was cut off, or the text. */
  async answer(branch) {
    if (!branch.busy && (await this.#ready(branch))) await this.#goOn(branch, []);
  }

  /** Whether the branch can continue without a new message. */
  canGoOn(branch) {
    const last = branch.messages.at(-1);
    return !branch.busy && last !== undefined && (this.chats === false || last.role === 'user' || last.open);
  }

  async #goOn(branch, more) {
    branch.error = '';
    branch.busy = true;
    branch.stopper = new AbortController();
    const said = more.map(({ content }) => content).join('');
    const progress = { entered: false, given: false };
    try {
      branch.waits = !this.#answers.free;
      await this.#answers.enter(branch.stopper.signal);
      progress.entered = true;
      branch.waits = false;
      await this.#attempt(branch, more, progress);
    } catch (error) {
      if (error.name !== 'AbortError') branch.error = error.message;
      // Return an unsent message to the input field, and remove an answer that never started.
      const unsent = (branch.id !== null || !progress.entered) && !progress.given;
      if (unsent) branch.draft ||= said;
      const synced = await this.#resync(branch).catch(() => false); // the error is already shown
      if (synced) return;
      if (unsent && said) branch.messages.pop();
      else dropEmptyAnswer(branch);
    } finally {
      if (progress.entered) this.#answers.leave();
      branch.busy = false;
      branch.waits = false;
      branch.stopper = null;
    }
  }

  /** Gives the pieces `more` to the session and generates. If the server has dropped the session, a new one gets all pieces. */
  async #attempt(branch, more, progress) {
    const known = branch.id !== null;
    try {
      await this.#exchange(branch, more, progress);
    } catch (error) {
      if (!known || error.status !== 404) throw error;
      branch.id = null;
      progress.given = false;
      dropEmptyAnswer(branch);
      await this.#exchange(branch, more, progress);
    }
  }
  async #exchange(branch, more, progress) {
    const id = await this.#session(branch, more);
    progress.given = true;
    await this.#answer(branch, id);
  }

  async #answer(branch, id) {
    const options = { max_tokens: this.maxTokens, temperature: this.temperature, stream_options: { include_usage: true } };
    if (this.pace) options.kvist = { pace: this.pace };
    const said = branch.messages.map(({ role, content }) => ({ role, content }));
    // The continuation of an interrupted answer belongs to the same message. In a text it is a new piece, so that the shared
    // part stays a piece of its own.
    if (!(this.chats && id !== null && branch.messages.at(-1).open)) branch.messages.push(piece('assistant', ''));
    const answer = branch.messages.at(-1); // the reactive proxy of the piece
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

  /** The point of the session right after piece `i`, for forks and rollbacks. */
  #place(branch, i) {
    return this.chats ? { message: i + 1 } : branch.messages[i].ends;
  }

  /** Changes the session of a branch. Returns the server's answer; null if there is no session, or the server has dropped it. */
  async #change(branch, verb, body) {
    if (branch.id === null) return null;
    try {
      return await api.post(`v1/sessions/${branch.id}/${verb}`, body);
    } catch (error) {
      if (error.status !== 404) throw error;
      return (branch.id = null);
    }
  }

  /** Adds `n` branches that start with the pieces up to and including `i`. */
  async fork(branch, i, n = 1) {
    branch.error = '';
    const copy = () => branch.messages.slice(0, i + 1).map((message) => ({ ...message }));
    try {
      const made = await this.#change(branch, 'fork', { n, at: this.#place(branch, i) });
      const ids = made ? made.sessions.map((session) => session.id) : new Array(n).fill(null);
      const place = this.branches.indexOf(branch) + 1;
      this.branches.splice(place, 0, ...ids.map((id) => new Branch(`Branch ${next++}`, copy(), id)));
    } catch (error) {
      branch.error = error.message;
    }
  }

  /** Removes everything after piece `i`. */
  async rollback(branch, i) {
    branch.error = '';
    try {
      await this.#change(branch, 'rollback', { to: this.#place(branch, i) });
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

  /** The key has changed, and the sessions belong to the old one: drops them. Continued branches create new sessions. */
  forget() {
    for (const branch of this.branches) this.stop(branch);
    this.leave();
    for (const branch of this.branches) branch.id = null;
  }

  /** Another server answers, or the same one after a restart: it has other sessions, and perhaps another model, which the
   *  playground asks for. Branches that are busy find out by themselves. */
  restarted() {
    for (const branch of this.branches) {
      if (branch.busy || branch.id === null) continue;
      api.remove(`v1/sessions/${branch.id}`).catch(() => {}); // it is gone, or expires
      branch.id = null;
    }
    this.sessions = null;
    this.chats = null;
  }

  /** Deletes the sessions when the page is closed, because they could not be found again. */
  leave() {
    for (const { id } of this.branches) if (id !== null) api.remove(`v1/sessions/${id}`, true).catch(() => {}); // the page is closing: no way to report an error
  }
}

/** The one instance of the page; it outlives a change to the cache view. */
export const talk = new Talk();
addEventListener('pagehide', (event) => event.persisted || talk.leave());
