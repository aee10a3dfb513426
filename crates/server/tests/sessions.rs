//! Sessions over real connections: counts what branches share, and compares their output with that of unshared
//! sessions.
#[path = "http/server.rs"]
mod server;

use kvist_client::{
    Client, Content, Cut, Error, Generate, Message, MessageContent, NewSession, Session, Usage,
};
use kvist_server::ServerConfig;
use kvist_server::config::SessionsSection;
use serde_json::{Map, Value, json};
use server::{MODEL, Server, config, key, model};

const TEXT: &str = "Returns the number of elements in the vector, also referred to as its length. The capacity of a \
     vector is the amount of space allocated for any future elements that will be added onto the vector. ";

const BLOCK: u64 = 16;

fn client(server: &Server) -> Client {
    Client::new(&format!("http://{}", server.address))
}

fn tokens(text: &str) -> Vec<u32> {
    model().tokenizer().unwrap().encode(text, true).unwrap()
}

/// A prompt of `n` tokens without repetition.
fn trunk(n: usize) -> Vec<u32> {
    let words: String =
        (0..n).map(|i| format!("{} {} ", i * 7919 % 1009, TEXT.split(' ').nth(i % 30).unwrap())).collect();
    let mut tokens = tokens(&words);
    assert!(tokens.len() >= n);
    tokens.truncate(n);
    tokens
}

fn greedy(n: u32) -> Generate {
    Generate { ignore_eos: Some(true), ..Generate::greedy(n) }
}

/// A token a second while nothing else runs, so that the test has time to act before the last one.
fn paced(n: u32) -> Generate {
    let mut how = greedy(n);
    how.more.insert("kvist".into(), json!({"pace": 1}));
    how
}

fn begin(client: &Client, content: impl Into<Content>) -> Session {
    client.create_session(&content.into(), &NewSession::default()).unwrap()
}

fn history(client: &Client, id: &str) -> Vec<u32> {
    client.session(id).unwrap().tokens
}

/// Status and code of the error.
fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> (u16, String) {
    match result {
        Err(Error::Api { status, code, .. }) => (status, code),
        other => panic!("not refused: {other:?}"),
    }
}

/// Counter values between two turns: stored KV bytes read by attention, moved and written, and tokens computed.
#[derive(Clone, Copy, Debug)]
struct Counted {
    read: u64,
    moved: u64,
    written: u64,
    computed: u64,
    steps: u64,
}

fn look(server: &Server) -> Counted {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let asked = server.engine.inspect(|state| {
        let bytes = state.executor.counters();
        let counters = state.scheduler.counters();
        Counted {
            read: bytes.bytes_read,
            moved: bytes.bytes_moved,
            written: bytes.bytes_written,
            computed: counters.computed_tokens,
            steps: counters.steps,
        }
    });
    runtime.block_on(asked).unwrap()
}

/// Generates in all sessions, starting in the same turn, and returns the counters' difference.
fn together(server: &Server, ids: &[String], how: &Generate) -> (Vec<Usage>, Counted) {
    let before = look(server);
    let paused = server.pause();
    let threads: Vec<_> = ids
        .iter()
        .map(|id| {
            let (client, id, how) = (client(server), id.clone(), how.clone());
            std::thread::spawn(move || client.generate(&id, &how).unwrap().usage)
        })
        .collect();
    drop(server.until_waiting(paused, ids.len()));
    let usages = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    server.becomes_idle();
    let after = look(server);
    let counted = Counted {
        read: after.read - before.read,
        moved: after.moved - before.moved,
        written: after.written - before.written,
        computed: after.computed - before.computed,
        steps: after.steps - before.steps,
    };
    (usages, counted)
}

/// Eight branches of a trunk of 900 tokens: they get prefix hits, nothing is copied, and attention reads the
/// trunk once per step, however many branches there are.
#[test]
fn eight_branches_of_a_long_trunk_are_counted() {
    const N: u64 = 8;
    const TRUNK: u64 = 900;
    const NEW: u64 = 24;
    let server = Server::start(config());
    let client = client(&server);
    let root = begin(&client, trunk(TRUNK as usize));
    client.generate(&root.id, &greedy(1)).unwrap();
    let branches = client.fork(&root.id, Some(Cut::Token(TRUNK as u32)), N as u32 + 1).unwrap();
    let ids: Vec<String> = branches.iter().map(|branch| branch.id.clone()).collect();
    for (i, id) in ids.iter().enumerate() {
        assert_eq!((branches[i].shared_tokens, branches[i].n_tokens), (TRUNK, TRUNK));
        client.append(id, &Content::Tokens(vec![100 + i as u32])).unwrap();
    }
    // KV bytes of a token in all layers: the bytes that a computed token writes.
    let (usage, one) = together(&server, &ids[..1], &greedy(NEW as u32));
    let row = one.written / one.computed;
    let (usages, eight) = together(&server, &ids[1..], &greedy(NEW as u32));
    let shared = TRUNK / BLOCK * BLOCK;
    for usage in usage.iter().chain(&usages) {
        assert_eq!(usage.prompt_tokens, TRUNK + 1);
        assert!(usage.cached_tokens >= shared, "{} of {shared} tokens were found", usage.cached_tokens);
    }
    assert_eq!((one.moved, eight.moved), (0, 0), "bytes of K and V copied");
    // Computed per branch: the trunk's last partial block, the branch's own token, and the generated tokens (no
    // KV is computed for the last one).
    let own = TRUNK - shared + 1 + NEW - 1;
    assert_eq!((one.computed, eight.computed), (own, N * own));
    assert_eq!((one.steps, eight.steps), (NEW, NEW), "all branches in one batch");
    // Distinct KV cells that the queries of a step attend to: the trunk, and each branch's own cells.
    let cells =
        |branches: u64| (0..NEW).map(|step| shared + branches * (TRUNK - shared + 1 + step)).sum::<u64>();
    println!(
        "attention bytes per step: one branch {}, eight {}; distinct cells x {row} bytes: {} and {}; unshared {}",
        one.read / NEW,
        eight.read / NEW,
        cells(1) * row / NEW,
        cells(N) * row / NEW,
        N * cells(1) * row / NEW,
    );
    assert_eq!(one.read, cells(1) * row, "one branch reads what it sees");
    assert_eq!(eight.read, cells(N) * row, "eight read the trunk once");
    assert!(eight.read * 5 < N * one.read * 2, "{} against {}", eight.read, N * one.read);
}

/// Starts branches of a trunk that is not computed yet at the same time: one computes it, the others get prefix
/// hits.
#[test]
fn a_cold_trunk_is_computed_once() {
    const TRUNK: u64 = 600;
    let server = Server::start(config());
    let client = client(&server);
    let root = begin(&client, trunk(TRUNK as usize));
    let branches = client.fork(&root.id, None, 8).unwrap();
    for (i, branch) in branches.iter().enumerate() {
        client.append(&branch.id, &Content::Tokens(vec![200 + i as u32])).unwrap();
    }
    let before = look(&server).computed;
    let threads: Vec<_> = branches
        .iter()
        .map(|branch| {
            let (client, id) = (client.clone(), branch.id.clone());
            std::thread::spawn(move || client.generate(&id, &greedy(8)).unwrap().usage)
        })
        .collect();
    let usages: Vec<Usage> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    server.becomes_idle();
    let computed = look(&server).computed - before;
    let own = TRUNK % BLOCK + 1 + 7;
    assert_eq!(computed, TRUNK / BLOCK * BLOCK + 8 * own);
    let found = usages.iter().filter(|usage| usage.cached_tokens >= TRUNK / BLOCK * BLOCK).count();
    assert_eq!(found, 7, "{usages:?}");
}

/// A fork of a running session is a copy of its state at that moment. Both continue to the same text as a
/// session that was never forked.
#[test]
fn a_fork_of_a_running_session_says_what_it_would_have_said() {
    const N: u32 = 160;
    let server = Server::start(config());
    let client = client(&server);
    let alone = begin(&client, TEXT);
    client.generate(&alone.id, &greedy(N)).unwrap();
    let expected = history(&client, &alone.id);
    let prompt = expected.len() - N as usize;

    let running = begin(&client, TEXT);
    let mut stream = client.generate_stream(&running.id, &paced(N)).unwrap();
    let mut forks = Vec::new();
    for chunk in stream.by_ref().take(3) {
        chunk.unwrap();
        forks.extend(client.fork(&running.id, None, 1).unwrap());
    }
    let lengths: Vec<u64> = forks.iter().map(|fork| fork.n_tokens).collect();
    assert!(lengths.is_sorted() && lengths[0] > prompt as u64, "{lengths:?}");
    // Beside the first of them, which has no pace, the running session goes on at full speed.
    for fork in &forks {
        let there = fork.n_tokens as usize;
        assert_eq!(history(&client, &fork.id), expected[..there]);
        let usage = client.generate(&fork.id, &greedy((expected.len() - there) as u32)).unwrap().usage;
        assert_eq!(history(&client, &fork.id), expected);
        assert!(usage.cached_tokens >= (there as u64 - 1) / BLOCK * BLOCK, "{usage:?} of {there}");
    }
    stream.for_each(|chunk| drop(chunk.unwrap()));
    assert_eq!(history(&client, &running.id), expected, "forking does not disturb");
    // A fork in the middle of the trunk.
    let early = client.fork(&running.id, Some(Cut::Token(prompt as u32 + 7)), 1).unwrap().remove(0);
    client.generate(&early.id, &greedy(N - 7)).unwrap();
    assert_eq!(history(&client, &early.id), expected);
}

#[test]
fn what_a_client_that_went_away_has_heard_stays() {
    let server = Server::start(config());
    let client = client(&server);
    let alone = begin(&client, TEXT);
    client.generate(&alone.id, &greedy(400)).unwrap();
    let expected = history(&client, &alone.id);
    let session = begin(&client, TEXT);
    let mut stream = client.generate_stream(&session.id, &paced(400)).unwrap();
    let heard: String = stream.by_ref().take(3).map(|chunk| chunk.unwrap().text).collect();
    let paused = server.pause();
    assert_eq!(refusal(client.append(&session.id, &"x".into())), (409, "session_busy".into()));
    assert_eq!(refusal(client.rollback(&session.id, Cut::Token(1))), (409, "session_busy".into()));
    assert_eq!(refusal(client.generate(&session.id, &greedy(1))), (409, "session_busy".into()));
    drop(stream);
    let ended = || !client.session(&session.id).unwrap().session.running;
    server.until("it is noticed", ended);
    drop(paused);
    server.becomes_idle();
    let left = client.session(&session.id).unwrap();
    assert!(left.text.unwrap().contains(heard.trim_end()), "what was heard is there");
    let n = left.tokens.len();
    assert!(n > session.n_tokens as usize && n < expected.len(), "{n} tokens");
    assert_eq!(left.tokens, expected[..n]);
    client.generate(&session.id, &greedy((expected.len() - n) as u32)).unwrap();
    assert_eq!(history(&client, &session.id), expected, "it goes on where it was left");
}

/// A session generates at the engine's speed even if its client does not read. Deleting it ends the generation
/// at once.
#[test]
fn a_client_that_does_not_read_holds_up_nothing() {
    let mut config = config();
    // It hangs up on a client that does not read for longer.
    config.limits.read_timeout_s = 3600.0;
    let server = Server::start(config);
    let client = client(&server);
    // More data than fits into the connection's buffers.
    let scored = |mut how: Generate| {
        how.more.extend([("logprobs".into(), json!(true)), ("top_logprobs".into(), json!(20))]);
        how
    };
    let session = begin(&client, TEXT);
    let stream = client.generate_stream(&session.id, &scored(greedy(900))).unwrap();
    server.until("it ends", || !client.session(&session.id).unwrap().session.running);
    let there = client.session(&session.id).unwrap().session.n_tokens;
    assert_eq!(there, session.n_tokens + 900, "all of it is there, unread");
    let read: Vec<_> = stream.map(Result::unwrap).collect();
    assert!(!read.is_empty());

    let session = begin(&client, TEXT);
    let stream = client.generate_stream(&session.id, &scored(paced(900))).unwrap();
    server.until("it begins", || client.session(&session.id).unwrap().session.n_tokens > session.n_tokens);
    let before = look(&server).computed;
    let paused = server.pause();
    client.delete_session(&session.id).unwrap();
    drop(paused);
    server.becomes_idle();
    assert!(look(&server).computed < before + 700, "it was ended, and did not end by itself");
    let end = stream.filter_map(Result::err).last();
    assert!(matches!(&end, Some(Error::Api { code, .. }) if code == "session_not_found"), "{end:?}");
}

/// Blocks that were evicted are recomputed; the output does not change.
#[test]
fn memory_pressure_does_not_show() {
    let small = ServerConfig {
        cache: kvist_server::config::CacheSection { tokens: Some(256), ..config().cache },
        ..config()
    };
    let (server, roomy) = (Server::start(small), Server::start(config()));
    let (client, other) = (client(&server), client(&roomy));
    let root = begin(&client, trunk(120));
    client.generate(&root.id, &greedy(8)).unwrap();
    let branches = client.fork(&root.id, None, 3).unwrap();
    // Another request fills the cache, so that the trunk is evicted.
    client.complete(&TEXT.repeat(4), &greedy(20)).unwrap();
    let before = server.engine.stats().evicted_blocks;
    assert!(before > 0);
    for (i, branch) in branches.iter().enumerate() {
        client.append(&branch.id, &Content::Tokens(vec![50 + i as u32])).unwrap();
        let usage = client.generate(&branch.id, &greedy(60)).unwrap().usage;
        assert_eq!(usage.cached_tokens < 120, i == 0, "the first computes it anew: {usage:?}");
        let same = begin(&other, history(&client, &branch.id)[..129].to_vec());
        other.generate(&same.id, &greedy(60)).unwrap();
        assert_eq!(history(&client, &branch.id), history(&other, &same.id), "branch {i}");
    }
    server.becomes_idle();
}

/// A session of messages produces the same answers as chat completions with the same messages.
#[test]
fn messages_are_those_of_chat_completions() {
    let server = Server::start(config());
    let client = client(&server);
    let mut said = vec![Message::system("Be brief."), Message::user("What is a vector?")];
    let session = begin(&client, Content::Messages(said.clone()));
    for turn in 0..3 {
        let how = Generate::greedy(20);
        let expected = client.chat(&said, &how).unwrap();
        let answer = client.generate(&session.id, &how).unwrap();
        assert_eq!(answer.text, expected.text, "turn {turn}");
        assert_eq!(answer.finish_reason, expected.finish_reason);
        assert_eq!(answer.usage.prompt_tokens, expected.usage.prompt_tokens, "turn {turn}");
        assert_eq!(answer.document["session"], session.id.as_str());
        assert_eq!(answer.document["object"], "chat.completion");
        let there = client.session(&session.id).unwrap();
        let messages = there.messages.unwrap();
        assert_eq!(messages.len(), said.len() + 1);
        let last = messages.last().unwrap();
        let content = answer.text.as_str();
        assert_eq!(last.message, Message::assistant(content));
        assert_eq!(last.open, answer.finish_reason == "length");
        said.push(Message::assistant(content));
        said.push(Message::user("And what is its capacity?"));
        let grown = client.append(&session.id, &Content::from([said.last().unwrap().clone()])).unwrap();
        assert_eq!(
            grown.kept_tokens,
            Some(there.tokens.len() as u64),
            "what was drawn stays as it was drawn"
        );
    }
    // A cut at a message: as if the later messages had never existed.
    let branch = client.fork(&session.id, Some(Cut::Message(2)), 1).unwrap().remove(0);
    assert_eq!(branch.n_messages, Some(2));
    let answer = client.generate(&branch.id, &Generate::greedy(20)).unwrap();
    assert_eq!(answer.text, client.chat(&said[..2], &Generate::greedy(20)).unwrap().text);
    // A cut inside an answer: the answer can be continued.
    let open = client.session(&branch.id).unwrap();
    let begins = open.messages.as_ref().unwrap()[2].begins.unwrap();
    let (all, n) = (open.tokens.clone(), open.tokens.len() as u32);
    client.rollback(&branch.id, Cut::Token(n - 4)).unwrap();
    let begun = client.session(&branch.id).unwrap().messages.unwrap().remove(2);
    assert!(begun.open);
    let rest = client.generate(&branch.id, &Generate::greedy(4)).unwrap();
    assert_eq!(history(&client, &branch.id), all);
    // A space at the start of the rest is part of the answer.
    assert_eq!(begun.message.text() + &rest.text, answer.text);
    // A cut inside text that the template wrote: it is not a message, and no message can follow.
    client.rollback(&branch.id, Cut::Token(begins as u32 + 1)).unwrap();
    assert_eq!(client.session(&branch.id).unwrap().session.n_messages, Some(2));
    let refused = client.append(&branch.id, &Content::from([Message::user("x")]));
    assert_eq!(refusal(refused), (409, "inside_message".into()));
    client.rollback(&branch.id, Cut::Message(2)).unwrap();
    client.append(&branch.id, &Content::from([Message::user("x")])).unwrap();
}

/// Messages with parts and names are returned as they were sent.
#[test]
fn messages_of_parts_are_read_back() {
    let server = Server::start(config());
    let client = client(&server);
    let part = |text: &str| json!({"type": "text", "text": text});
    let parts = Message {
        content: Some(MessageContent::Parts(vec![part("What is"), part("a vector?")])),
        more: serde_json::from_value(json!({"name": "ann"})).unwrap(),
        ..Message::user("")
    };
    let said = [Message::system("Be brief."), parts.clone()];
    let session = begin(&client, said.clone());
    let joined = begin(&client, [Message::system("Be brief."), Message::user("What is\na vector?")]);
    let there = client.session(&session.id).unwrap();
    assert_eq!(there.tokens, history(&client, &joined.id));
    let read: Vec<Message> = there.messages.unwrap().into_iter().map(|placed| placed.message).collect();
    assert_eq!(read, said);
    assert_eq!(read[1].text(), "What is\na vector?");
}

/// A long conversation in one request: the position of every message is known, and equals the length of the
/// conversation before it.
#[test]
fn every_message_of_a_long_conversation_has_its_place() {
    let server = Server::start(config());
    let client = client(&server);
    let said: Vec<Message> = (0..60)
        .map(|i| Message::new(["user", "assistant"][i % 2], &format!("Number {i} says {}.", i * 7919 % 1009)))
        .collect();
    let all = begin(&client, Content::Messages(said.clone()));
    let there = client.session(&all.id).unwrap();
    for (at, placed) in there.messages.unwrap().iter().enumerate() {
        let begins = placed.begins.unwrap_or_else(|| panic!("message {at} has no place")) as usize;
        if at % 7 == 1 {
            let part = begin(&client, Content::Messages(said[..at].to_vec()));
            assert_eq!(history(&client, &part.id), there.tokens[..begins], "message {at}");
        }
    }
    // Text that cannot fit is rejected by its size, before it is tokenized.
    let long = Message::user(&"0123456789abcdef".repeat(200_000));
    match client.create_session(&Content::from([long]), &NewSession::default()) {
        Err(Error::Api { code, message, .. }) => {
            assert_eq!(code, "context_length_exceeded");
            assert!(message.contains("bytes besides white space"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    let text = Content::Text("0123456789abcdef".repeat(200_000));
    let refused = client.create_session(&text, &NewSession::default());
    assert!(
        matches!(&refused, Err(Error::Api { message, .. }) if message.contains("besides white space")),
        "{refused:?}"
    );
}

/// A stop string is not part of the history.
#[test]
fn stop_strings_are_no_part_of_a_history() {
    let server = Server::start(config());
    let client = client(&server);
    let session = begin(&client, TEXT);
    let text = client.generate(&session.id, &greedy(40)).unwrap().text;
    let words: Vec<&str> = text.split_whitespace().collect();
    let stop = format!("{} {}", words[3], words[4]);
    client.rollback(&session.id, Cut::Token(session.n_tokens as u32)).unwrap();
    let how = Generate { stop: Some(vec![stop.clone()]), ..greedy(40) };
    let answer = client.generate(&session.id, &how).unwrap();
    assert_eq!(answer.finish_reason, "stop");
    assert_eq!(answer.text, text[..text.find(&stop).unwrap()]);
    let there = client.session(&session.id).unwrap().text.unwrap();
    assert!(there.ends_with(&answer.text), "{there:?} does not end with {:?}", answer.text);
}

#[test]
fn a_winner_is_kept_and_the_tree_stays_one() {
    let server = Server::start(config());
    let client = client(&server);
    let root = begin(&client, TEXT);
    let forks = client.fork(&root.id, None, 4).unwrap();
    let below = client.fork(&forks[1].id, Some(Cut::Token(3)), 2).unwrap();
    let deep = client.fork(&below[0].id, None, 1).unwrap();
    let other = client.fork(&root.id, None, 1).unwrap();
    assert_eq!(below[0].shared_tokens, 3);
    let tree = client.sessions().unwrap();
    assert_eq!(tree.len(), 9);
    let find = |id: &str| tree.iter().find(|session| session.id == id).unwrap();
    let mut children = find(&root.id).children.clone();
    children.sort();
    let mut expected: Vec<String> = forks.iter().chain(&other).map(|fork| fork.id.clone()).collect();
    expected.sort();
    assert_eq!(children, expected);
    assert_eq!(find(&deep[0].id).parent.as_deref(), Some(below[0].id.as_str()));

    assert_eq!(refusal(client.keep(&root.id, &[])), (409, "not_a_fork".into()));
    assert_eq!(refusal(client.keep(&forks[0].id, &[&other[0].id])).0, 400);
    // A deleted sibling stops generating.
    let mut stream = client.generate_stream(&forks[2].id, &paced(900)).unwrap();
    assert!(stream.next().unwrap().is_ok());
    let mut deleted = client.keep(&forks[0].id, &[&forks[3].id]).unwrap();
    deleted.sort();
    let mut expected: Vec<&str> =
        [&forks[1], &forks[2], &below[0], &below[1], &deep[0]].map(|session| session.id.as_str()).to_vec();
    expected.sort_unstable();
    assert_eq!(deleted, expected);
    let end = stream.find_map(Result::err);
    assert!(matches!(&end, Some(Error::Api { code, .. }) if code == "session_not_found"), "{end:?}");
    drop(stream);
    server.becomes_idle();
    assert!(client.keep(&forks[0].id, &[&forks[3].id]).unwrap().is_empty());
    // If the parent is deleted, the grandparent becomes the parent.
    let grandchild = client.fork(&forks[0].id, None, 1).unwrap().remove(0);
    client.delete_session(&forks[0].id).unwrap();
    let there = client.session(&grandchild.id).unwrap().session;
    assert_eq!(there.parent.as_deref(), Some(root.id.as_str()));
    assert_eq!(refusal(client.session(&forks[0].id)), (404, "session_not_found".into()));
}

#[test]
fn sessions_are_their_owners_alone() {
    let mut with_keys = config();
    with_keys.keys = vec![key("ann", "ann-secret", false), key("bob", "bob-secret", true)];
    let server = Server::start(with_keys);
    let (ann, bob) = (client(&server).with_key("ann-secret"), client(&server).with_key("bob-secret"));
    let root = begin(&ann, TEXT);
    let forks = ann.fork(&root.id, None, 2).unwrap();
    assert!(bob.sessions().unwrap().is_empty());
    let id = &forks[0].id;
    let unknown = (404, "session_not_found".to_string());
    for id in [id.as_str(), "sess-00000000000000000000000000000000", "nonsense"] {
        assert_eq!(refusal(bob.session(id)), unknown);
        assert_eq!(refusal(bob.append(id, &"a".into())), unknown);
        assert_eq!(refusal(bob.generate(id, &greedy(1))), unknown);
        assert_eq!(refusal(bob.fork(id, None, 1)), unknown);
        assert_eq!(refusal(bob.rollback(id, Cut::Token(0))), unknown);
        assert_eq!(refusal(bob.keep(id, &[])), unknown);
        assert_eq!(refusal(bob.delete_session(id)), unknown);
    }
    let own = begin(&bob, TEXT);
    let mine = bob.fork(&own.id, None, 1).unwrap().remove(0);
    assert_eq!(refusal(bob.keep(&mine.id, &[id])).0, 400, "another one's is no sibling");
    assert_eq!(refusal(client(&server).sessions()), (401, "invalid_api_key".into()));
    assert_eq!(ann.sessions().unwrap().len(), 3, "nothing has happened to them");
    // Their prefixes are not shared either.
    ann.generate(&root.id, &greedy(4)).unwrap();
    assert_eq!(bob.generate(&own.id, &greedy(4)).unwrap().usage.cached_tokens, 0);
    let salted = NewSession { cache_salt: Some("s".into()), ..NewSession::default() };
    let salted = ann.create_session(&TEXT.into(), &salted).unwrap();
    assert_eq!(ann.generate(&salted.id, &greedy(4)).unwrap().usage.cached_tokens, 0);
    let fork = ann.fork(&salted.id, None, 1).unwrap().remove(0);
    assert_eq!(fork.cache_salt.as_deref(), Some("s"));
    assert!(ann.generate(&fork.id, &greedy(4)).unwrap().usage.cached_tokens > 0, "forks share their salt");
}

#[test]
fn quotas() {
    let mut narrow = config();
    narrow.sessions = SessionsSection { max_sessions: 3, max_tokens: 120, ..narrow.sessions };
    let server = Server::start(narrow);
    let client = client(&server);
    let quota = (429, "session_quota".to_string());
    let root = begin(&client, tokens(TEXT)[..30].to_vec());
    assert_eq!(refusal(client.fork(&root.id, None, 3)), quota, "too many");
    assert_eq!(client.sessions().unwrap().len(), 1, "none of them was made");
    let forks = client.fork(&root.id, None, 2).unwrap();
    assert_eq!(refusal(client.create_session(&Content::Nothing, &NewSession::default())), quota);
    assert_eq!(refusal(client.append(&root.id, &tokens(TEXT)[..31].to_vec().into())), quota);
    // Generated tokens count at once; exceeding the quota is reported as an error.
    let ended = client.generate(&root.id, &greedy(64));
    assert_eq!(refusal(ended), quota);
    assert_eq!(history(&client, &root.id).len(), 61, "30 tokens were left, one is over");
    assert_eq!(refusal(client.generate(&forks[0].id, &greedy(1))), quota);
    client.rollback(&root.id, Cut::Token(30)).unwrap();
    client.generate(&forks[0].id, &greedy(1)).unwrap();
}

/// Regression: 600 requests for one session whose responses were not read kept a copy of its history each, 1.6
/// GB in all, which no limit counted. (Expiry and the fate of forks are tested with a fake clock in
/// `src/sessions/store/tests.rs`.)
#[test]
fn histories_that_are_not_read_have_a_bound() {
    use std::io::{BufReader, Write};
    let mut config = config();
    config.limits.max_body_bytes = 16 << 20;
    // No timeouts in this test.
    (config.limits.read_timeout_s, config.limits.request_timeout_s) = (3600.0, 3600.0);
    let server = Server::start(config);
    // The template does not render names, so this session has few tokens but many bytes.
    let named = json!({"role": "user", "content": "a", "name": "n".repeat(8_000_000)});
    let long = server.post("/v1/sessions", &json!({"messages": [named]})).good();
    let path = format!("/v1/sessions/{}", long["id"].as_str().unwrap());
    let unread = || {
        let mut stream = server.connect();
        stream.write_all(&server::request("GET", &path, &[], b"")).unwrap();
        let mut reader = BufReader::with_capacity(1, stream);
        let (status, _) = server::head(&mut reader);
        (status, reader)
    };
    let unread: Vec<_> = (0..4).map(|_| unread()).collect();
    assert!(unread.iter().all(|(status, _)| *status == 200));
    let refused = server.get(&path);
    assert_eq!((refused.status, refused.error().2.as_str()), (503, "server_busy"));
    let described = server.get("/openapi.json").good();
    assert!(described["paths"]["/v1/sessions/{id}"]["get"]["responses"]["503"].is_object());
    // A short session can be read at any time.
    let short = server.post("/v1/sessions", &json!({"text": "fn main"})).good();
    server.get(&format!("/v1/sessions/{}", short["id"].as_str().unwrap())).good();
    drop(unread);
    server.until("there is room again", || server.get(&path).status == 200);
}

/// A long history is sent in parts and has the same content as a short one.
#[test]
fn long_histories_are_told_whole() {
    let server = Server::start(config());
    let said = |i: usize, name: &str| {
        let role = ["user", "assistant"][i % 2];
        json!({"role": role, "content": format!("{i}: \"é\"\n{}", &TEXT[..20]), "name": name})
    };
    // The template does not render names.
    let told = [1, 4_000].map(|n| {
        let messages: Vec<Value> = (0..10).map(|i| said(i, &"n".repeat(n))).collect();
        let made = server.post("/v1/sessions", &json!({"messages": messages})).good();
        let answer = server.get(&format!("/v1/sessions/{}", made["id"].as_str().unwrap()));
        let is_long = n > 1;
        assert_eq!(answer.header("transfer-encoding").is_some(), is_long);
        let looked = answer.good();
        let told: Vec<Value> =
            looked["messages"].as_array().unwrap().iter().map(|m| m["message"].clone()).collect();
        assert_eq!(told, messages);
        let mut looked = looked;
        for message in looked["messages"].as_array_mut().unwrap() {
            message["message"].as_object_mut().unwrap().remove("name");
        }
        for of_its_own in ["id", "created", "expires"] {
            assert!(!looked.as_object_mut().unwrap().remove(of_its_own).unwrap().is_null());
        }
        looked
    });
    assert_eq!(told[0], told[1]);
    let names = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&told[0]), names(&told[1]));
    assert!(told[0]["text"].as_str().unwrap().contains("9: \"é\"\n") && told[0]["tokens"][0].is_u64());
}

#[test]
fn sessions_at_rest_go() {
    let mut brief = config();
    brief.sessions = SessionsSection { idle_s: 0.2, ..brief.sessions };
    let server = Server::start(brief);
    let client = client(&server);
    let root = begin(&client, TEXT);
    let gone = || client.session(&root.id).is_err_and(|e| matches!(&e, Error::Api { status: 404, .. }));
    server.until("it goes", gone);
    assert_eq!(refusal(client.session(&root.id)), (404, "session_not_found".into()));
    assert!(client.sessions().unwrap().is_empty());
}

#[test]
fn what_cannot_be_done_is_said() {
    let mut small = config();
    small.limits.max_body_bytes = 4096;
    let server = Server::start(small);
    let client = client(&server);
    let text = begin(&client, TEXT);
    let chat = begin(&client, [Message::user("a")]);
    let empty = begin(&client, Content::Nothing);
    let path = |id: &str, verb: &str| format!("/v1/sessions/{id}/{verb}");
    let (t, c, e) = (&text.id, &chat.id, &empty.id);
    let long = "long ".repeat(2000);
    let rows = [
        ("/v1/sessions".to_string(), json!({"text": "a", "tokens": [1]}), 400, "invalid_type"),
        ("/v1/sessions".into(), json!({"txt": "a"}), 400, "unknown_parameter"),
        ("/v1/sessions".into(), json!({"model": "gpt", "text": "a"}), 404, "model_not_found"),
        ("/v1/sessions".into(), json!({"tokens": [9999999]}), 400, "invalid_value"),
        (
            "/v1/sessions".into(),
            json!({"messages": [{"role": "wizard", "content": "a"}]}),
            400,
            "invalid_value",
        ),
        ("/v1/sessions".into(), json!({"text": long}), 413, "body_too_large"),
        (path(t, "append"), json!({}), 400, ""),
        (path(t, "append"), json!({"messages": [{"role": "user", "content": "a"}]}), 400, "invalid_value"),
        (path(c, "append"), json!({"text": "a"}), 400, "invalid_value"),
        (path(t, "generate"), json!({"n": 2}), 400, "unsupported_parameter"),
        (
            path(t, "generate"),
            json!({"tools": [{"type": "function", "function": {"name": "f"}}]}),
            400,
            "unsupported_parameter",
        ),
        (path(t, "generate"), json!({"max_tokens": 0}), 400, "invalid_value"),
        (path(t, "generate"), json!({"top_logprobs": 2}), 400, "invalid_value"),
        (path(t, "generate"), json!({"add_generation_prompt": true}), 400, "invalid_value"),
        (path(e, "generate"), json!({}), 409, "session_empty"),
        (path(t, "fork"), json!({"at": 100000}), 400, "invalid_value"),
        (path(t, "fork"), json!({"at": 500}), 400, "invalid_value"),
        (path(t, "fork"), json!({"at": {"message": 0}}), 400, "invalid_value"),
        (path(c, "fork"), json!({"at": {"message": 2}}), 400, "invalid_value"),
        (path(c, "fork"), json!({"n": 0}), 400, "invalid_value"),
        (path(t, "rollback"), json!({}), 400, "missing_parameter"),
        (path(t, "rollback"), json!({"to": -1}), 400, "invalid_value"),
        (path(t, "rollback"), json!({"to": null}), 400, "invalid_type"),
        (path(t, "keep"), json!({}), 409, "not_a_fork"),
        (path(t, "keep"), json!({"also": ["nonsense"]}), 400, "invalid_value"),
        (path(t, "dance"), json!({}), 404, "unknown_url"),
    ];
    let mut wrong = Vec::new();
    for (path, body, status, code) in rows {
        let (found, _, told, message) = server.post(&path, &body).error();
        if found != status || (!code.is_empty() && told != code) {
            wrong.push(format!("{path} {body}: {found} {told}: {message}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(server.send("PUT", &path(t, "fork"), &[], b"").status, 405);
    // None of these requests changed a session.
    for session in [&text, &chat, &empty] {
        let there = client.session(&session.id).unwrap().session;
        assert_eq!((there.n_tokens, there.running), (session.n_tokens, false));
    }
    // The API description lists all session endpoints.
    let described: Value = server.get("/openapi.json").json();
    for verb in ["append", "generate", "fork", "rollback", "keep"] {
        assert!(described["paths"][format!("/v1/sessions/{{id}}/{verb}")]["post"].is_object(), "{verb}");
    }
    assert!(described["paths"]["/v1/sessions/{id}"]["delete"].is_object());
}

/// Streams, log-probabilities and grammars work as in chat completions.
#[test]
fn generations_are_written_as_chat_completions_are() {
    let server = Server::start(config());
    let client = client(&server);
    let session = begin(&client, [Message::user("What is a vector?")]);
    let forks = client.fork(&session.id, None, 3).unwrap();
    let whole = client.generate(&forks[0].id, &Generate::greedy(12)).unwrap();
    let (text, usage) = client.generate_stream(&forks[1].id, &Generate::greedy(12)).unwrap().text().unwrap();
    assert_eq!(text, whole.text);
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (whole.usage.prompt_tokens, 12));
    let more: Map<String, Value> = serde_json::from_value(json!({
        "logprobs": true, "top_logprobs": 2, "response_format": {"type": "json_object"},
        "kvist": {"explain": true},
    }))
    .unwrap();
    let form = Generate { more, ..Generate::greedy(200) };
    let answer = client.generate(&forks[2].id, &form).unwrap();
    let scores = answer.document["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(scores.len() as u64, answer.usage.completion_tokens);
    assert!(answer.document["kvist"]["prompts"][0]["miss"].is_object(), "{}", answer.document);
    assert!(answer.text.trim_start().starts_with('{'), "{}", answer.text);
    let events = server.post(
        &format!("/v1/sessions/{}/generate", forks[0].id),
        &json!({"stream": true, "max_tokens": 3, "ignore_eos": true, "add_generation_prompt": false}),
    );
    // Regression: `return_token_ids` was accepted and ignored here.
    let more = serde_json::from_value(json!({"return_token_ids": true})).unwrap();
    let with_ids = Generate { more, ..Generate::greedy(5) };
    let branch = client.fork(&session.id, None, 1).unwrap().remove(0);
    let answer = client.generate(&branch.id, &with_ids).unwrap().document;
    let mut said: Vec<u32> = serde_json::from_value(answer["prompt_token_ids"].clone()).unwrap();
    let ids: Vec<u32> = serde_json::from_value(answer["choices"][0]["token_ids"].clone()).unwrap();
    said.extend(ids);
    assert_eq!(said, history(&client, &branch.id));
    for event in events.events() {
        assert_eq!((&event["session"], &event["model"]), (&json!(forks[0].id), &json!(MODEL)));
        assert_eq!(event["object"], "chat.completion.chunk");
    }
}
