//! Branches on a real model: draft trees verified in one pass, forks and undo in a chat, layers that share KV.
use crate::common::{f32_model as model, *};
use kvist_cache::{NodeId, Refused, SeqId};
use kvist_cpu::Cpu;
use kvist_device::{Purpose, Storage};
use kvist_engine::Error;
use kvist_engine::chat::Chat;
use kvist_engine::devices;
use kvist_engine::generate::Limits;
use kvist_engine::memory::{CacheConfig, MemoryPlan};
use kvist_engine::sampler::{Sampler, SamplerConfig};
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::{LoadOptions, Model, ModelFile, top_two};

const A: SeqId = SeqId::ONLY;
/// Tolerance for f32 sums over the same cells, split at other places.
const TOLERANCE: f32 = 1e-3;
/// Tokens with a smaller lead may swap; see `kinds.rs`.
const NEAR_TIE: f32 = 1e-3;

fn prompt() -> Vec<u32> {
    let text = "A reference is a value that points to data owned by another value. The borrow checker makes sure that \
                the data outlives every reference to it, and that";
    model().tokenizer().unwrap().encode(text, true).unwrap()
}

fn started(config: &CacheConfig) -> ModelSession {
    let mut s = session(model(), config);
    s.prefill(A, &prompt(), &mut |_| true).unwrap();
    s
}

/// Tokens and the indices of their parents.
type Nodes = Vec<(u32, Option<u32>)>;

/// A draft tree after the committed tokens, as (token, parent). Its path 0, 2, 5, 6 is the greedy continuation.
///
/// ```text
/// 0 ── 2 ── 5 ── 6
/// │    └─── 4
/// └─── 3
/// 1
/// ```
fn draft() -> (Nodes, [NodeId; 4], Vec<u32>) {
    let good = greedy(&mut session(model(), &exact("contiguous", 128, 64)), &prompt(), 5, false);
    let tree = vec![
        (good[0], None),
        (7, None),
        (good[1], Some(0)),
        (100, Some(0)),
        (200, Some(2)),
        (good[2], Some(2)),
        (good[3], Some(5)),
    ];
    (tree, [0, 2, 5, 6].map(NodeId), good)
}

/// Adds the nodes `range` of the tree; returns the logits of each.
fn propose(
    s: &mut ModelSession,
    tree: &[(u32, Option<u32>)],
    range: std::ops::Range<usize>,
) -> Vec<Vec<f32>> {
    let tokens: Vec<u32> = tree[range.clone()].iter().map(|n| n.0).collect();
    let parents: Vec<Option<NodeId>> = tree[range.clone()].iter().map(|n| n.1.map(NodeId)).collect();
    s.forward(&[SequenceInput::draft_tree(A, &tokens, &parents)], LogitRows::All).unwrap();
    (0..range.len()).map(|row| s.logits_row(row).to_vec()).collect()
}

fn next_tokens(s: &mut ModelSession, first: u32, n: usize) -> Vec<(u32, f32)> {
    let mut all = Vec::new();
    let mut token = first;
    while all.len() < n {
        s.forward(&[SequenceInput::chain(A, &[token])], LogitRows::LastOfEach).unwrap();
        let next = top_two(s.logits_row(0)).unwrap();
        token = next.0;
        all.push(next);
    }
    all
}

/// Compares tokens, except after a near-tie.
fn same_text(what: &str, expected: &[(u32, f32)], found: &[(u32, f32)]) {
    if let Some(at) = expected.iter().zip(found).position(|(a, b)| a.0 != b.0) {
        let lead = expected[at].1.max(found[at].1);
        println!("{what}: token {at} differs at a lead of {lead}");
        assert!(lead <= NEAR_TIE, "{what}: token {at} differs at a lead of {lead}");
    }
}

fn policies() -> [CacheConfig; 2] {
    let full = exact("tree", 128, 64);
    [full.clone(), CacheConfig { window: Some(12), sinks: 2, ..full }]
}

#[test]
fn one_pass_over_a_draft_tree_equals_every_path_as_a_chain() {
    let (tree, accepted, good) = draft();
    for config in policies() {
        // In one step, and in two where the second continues nodes of the first.
        for cuts in [&[0, 7][..], &[0, 4, 7], &[0, 1, 3, 7]] {
            let what = format!("window {:?}, trees cut at {cuts:?}", config.window);
            let mut s = started(&config);
            let len = s.cache().next_position(A).unwrap();
            let logits: Vec<Vec<f32>> =
                cuts.windows(2).flat_map(|cut| propose(&mut s, &tree, cut[0]..cut[1])).collect();
            assert_eq!(s.cache().trees().unwrap().n_nodes(A), Some(7));
            assert_eq!(s.cache().next_position(A), Some(len), "nodes are no tokens");
            for (node, found) in logits.iter().enumerate() {
                let mut path = vec![];
                let mut at = Some(node as u32);
                while let Some(n) = at {
                    path.insert(0, tree[n as usize].0);
                    at = tree[n as usize].1;
                }
                let mut chain = started(&CacheConfig { kind: "contiguous".into(), ..config.clone() });
                chain.forward(&[SequenceInput::chain(A, &path)], LogitRows::LastOfEach).unwrap();
                let difference = max_difference(chain.logits_row(0), found);
                assert!(difference <= TOLERANCE, "{what}, node {node}: logits differ by {difference}");
            }
            // A chain would not need a verification.
            let error =
                s.forward(&[SequenceInput::chain(A, &[5])], LogitRows::LastOfEach).unwrap_err().to_string();
            assert!(error.contains("pending"), "{error}");

            // Accept a path, and continue as if it had been decoded token by token.
            let before = s.counters().bytes_moved;
            s.cache().trees().unwrap().commit_path(A, &accepted).unwrap();
            assert_eq!(s.counters().bytes_moved, before, "a verdict moves no byte");
            assert_eq!(s.cache().next_position(A), Some(len + 4));
            assert_eq!(s.cache().report()[0].used_cells, len + 4, "rejected nodes are free");
            let mut chain = started(&CacheConfig { kind: "contiguous".into(), ..config.clone() });
            chain.forward(&[SequenceInput::chain(A, &good[..4])], LogitRows::None).unwrap();
            same_text(&what, &next_tokens(&mut chain, good[4], 12), &next_tokens(&mut s, good[4], 12));
        }
    }
}

#[test]
fn a_discarded_tree_and_a_rollback_leave_nothing_behind() {
    let (tree, accepted, good) = draft();
    for config in policies() {
        let mut plain = started(&config);
        let expected = next_tokens(&mut plain, good[0], 8);
        let mut s = started(&config);
        let len = s.cache().next_position(A).unwrap();
        propose(&mut s, &tree, 0..7);
        s.cache().trees().unwrap().discard(A).unwrap();
        assert_eq!(s.cache().report()[0].used_cells, len);
        same_text("discard", &expected, &next_tokens(&mut s, good[0], 8));
        // Roll back to the prompt while a tree is pending.
        propose(&mut s, &tree, 0..7);
        s.cache().sequences().unwrap().seq_rm(A, len, u32::MAX).unwrap();
        assert_eq!(s.cache().trees().unwrap().n_nodes(A), Some(0));
        assert_eq!(s.cache().next_position(A), Some(len));
        same_text("rollback", &expected, &next_tokens(&mut s, good[0], 8));
        // Roll back into an accepted path: to its second token.
        s.cache().sequences().unwrap().seq_rm(A, len, u32::MAX).unwrap();
        propose(&mut s, &tree, 0..7);
        s.cache().trees().unwrap().commit_path(A, &accepted).unwrap();
        s.cache().sequences().unwrap().seq_rm(A, len + 1, u32::MAX).unwrap();
        same_text("into a path", &expected[1..], &next_tokens(&mut s, good[1], 7));
        // An invalid path changes nothing.
        s.cache().sequences().unwrap().seq_rm(A, len, u32::MAX).unwrap();
        propose(&mut s, &tree, 0..7);
        let refused = s.cache().trees().unwrap().commit_path(A, &[NodeId(0), NodeId(5)]);
        assert_eq!(refused, Err(Refused::BadParent { seq: A, node: NodeId(5) }));
        assert_eq!(s.cache().trees().unwrap().n_nodes(A), Some(7));
    }
}

/// Greedy, so that answers are comparable.
fn say(chat: &mut Chat, text: &str) -> (usize, String) {
    let mut sampler = Sampler::new(SamplerConfig::greedy()).unwrap();
    let limits = Limits { max_tokens: 12, stop: vec![], ignore_eos: true, no_cache: false };
    let turn = chat.send(text, &mut sampler, &limits, &mut ()).unwrap();
    assert_eq!(turn.generation.tokens.len(), 12);
    (turn.reused_tokens, turn.generation.text)
}

/// The messages of a chat without forks and undos.
fn fresh(turns: &[&str]) -> Vec<String> {
    let mut chat = Chat::new(session(model(), &exact("contiguous", 256, 64)), None);
    turns.iter().map(|turn| say(&mut chat, turn).1).collect()
}

#[test]
fn a_chat_reuses_what_its_branches_share() {
    let (first, left, right) = ("Ownership is a set of rules that", " Rust also has", " The compiler checks");
    for kind in ["cells", "tree"] {
        let mut chat = Chat::new(session(model(), &exact(kind, 512, 64)), None);
        let tokens = |text: &str| model().tokenizer().unwrap().encode(text, true).unwrap().len();
        let (reused, answer) = say(&mut chat, first);
        assert_eq!(reused, 0);
        // The cache stores all but the last sampled token, with which the next turn begins. Text does not always
        // re-tokenize to the same tokens, so less may be reused near the end of the answer, but never less than the
        // question.
        let cached = tokens(first) + 12 - 1;
        let moved = chat.session().counters().bytes_moved;
        chat.fork(Some("other")).unwrap();
        assert_eq!(chat.session().counters().bytes_moved, moved);
        let (reused, on_other) = say(&mut chat, left);
        assert!(
            (tokens(first)..=cached).contains(&reused),
            "{kind}: {reused} of {cached} reused after a fork"
        );
        chat.switch("main").unwrap();
        let (reused_here, on_main) = say(&mut chat, right);
        assert_eq!(reused_here, reused, "{kind}: both branches begin alike");
        assert_eq!(vec![answer.clone(), on_other], fresh(&[first, left]), "{kind}");
        assert_eq!(vec![answer.clone(), on_main], fresh(&[first, right]), "{kind}");
        // Undo, then send the message of the other branch.
        assert!(chat.undo());
        let (reused, again) = say(&mut chat, left);
        assert!(reused >= tokens(first), "{kind}: {reused} reused after undo");
        assert_eq!(vec![answer, again], fresh(&[first, left]), "{kind}");
        // Undo everything.
        assert!(chat.undo() && chat.undo() && !chat.undo());
        let (reused, anew) = say(&mut chat, right);
        assert!(reused <= 1, "{kind}: only the token that starts a text can be the same, {reused} are");
        assert_eq!(vec![anew], fresh(&[right]), "{kind}");
        let names: Vec<&str> = chat.branches().iter().map(|b| b.name.as_str()).collect();
        assert_eq!(names, ["main", "other"]);
        assert!(chat.fork(Some("other")).is_err() && chat.switch("nowhere").is_err());
    }
}

#[test]
fn undo_works_where_nothing_can_fork() {
    for (kind, reuses) in [("contiguous", true), ("ring", false)] {
        let mut chat = Chat::new(session(model(), &exact(kind, 512, 64)), None);
        let error = chat.fork(None).unwrap_err();
        assert!(matches!(&error, Error::Usage(text) if text.contains("cells, tree or paged")), "{error}");
        say(&mut chat, "A trait defines");
        say(&mut chat, " and an enum");
        assert!(chat.undo());
        let (reused, answer) = say(&mut chat, " but a struct");
        assert_eq!(reused > 0, reuses, "{kind}: {reused}");
        assert_eq!(answer, fresh(&["A trait defines", " but a struct"])[1], "{kind}");
    }
}

/// Regression: a generation that fails after its first token leaves more in the cache than the chat counts, and the next message was
/// computed behind that.
#[test]
fn tokens_that_a_chat_does_not_know_are_removed() {
    let question = "A trait defines";
    let expected = fresh(&[question, " and an enum"]);
    for kind in ["contiguous", "ring", "cells", "paged"] {
        let left_over = started(&exact(kind, 512, 64));
        let mut chat = Chat::new(left_over, None);
        assert_eq!(say(&mut chat, question), (0, expected[0].clone()), "{kind}");
        assert_eq!(say(&mut chat, " and an enum").1, expected[1], "{kind}");
    }
}

#[test]
fn a_layer_that_borrows_stores_nothing() {
    let folder = fixtures("parity/llama-shared-kv");
    let shared = load(ModelFile::Path(folder.clone())).unwrap();
    let layout = shared.layout();
    let (layers, owners) = (layout.layers.len(), layout.owners().count());
    assert_eq!((layers, owners), (4, 2));
    let registry = devices::all();
    for storage in ["f32", "f16", "q8", "q4", "q4-64-rot", "t4", "t4-o"] {
        let storage: Storage = storage.parse().unwrap();
        let config = CacheConfig { k: storage, v: storage.for_values(), ..CacheConfig::new(64) };
        let mut alone = shared.config().clone();
        alone.layers.iter_mut().enumerate().for_each(|(l, layer)| layer.owner = l);
        let bytes = |model: &kvist_model::config::ModelConfig| {
            let plan = MemoryPlan::of_session(model, &registry, &config).unwrap();
            (plan.kv_bytes_per_token, plan.usage.of(Purpose::KvCache))
        };
        let (half, half_all) = bytes(shared.config());
        let (whole, whole_all) = bytes(&alone);
        assert_eq!((2 * half, 2 * half_all), (whole, whole_all), "{storage}");
        // The budget agrees, for a full cache.
        let mut s = session(&shared, &config);
        let tokens: Vec<u32> = (0..64).map(|i| i % 100).collect();
        s.forward(&[SequenceInput::chain(A, &tokens)], LogitRows::None).unwrap();
        assert_eq!(shared.budget().usage().of(Purpose::KvCache), 64 * half, "{storage}");
        assert_eq!(s.kv_bytes(), 64 * half);
        assert_eq!(s.counters().bytes_written, 64 * half, "every token is written once, by the owners alone");
    }
    // The same for a model forced to share KV.
    let options = LoadOptions { share_kv: Some(2), ..LoadOptions::default() };
    let budget = kvist_device::MemoryBudget::unlimited();
    let made = Model::load(&ModelFile::Embedded, Cpu::default(), &options, &budget, &mut |_, _| {}).unwrap();
    let config = CacheConfig::new(64);
    let of = |model: &Model| MemoryPlan::of_session(model.config(), &registry, &config).unwrap();
    assert_eq!(2 * of(&made).kv_bytes_per_token, of(model()).kv_bytes_per_token);
}

/// Drafters learn from answers that are undone or dropped, and free what they store for them.
#[test]
fn drafters_hear_of_removed_answers() {
    use kvist_engine::speculate::{DraftRequest, Drafter, SpeculationConfig, Speculator};
    use std::sync::{Arc, Mutex};
    type Ended = Arc<Mutex<Vec<(u64, Vec<u32>)>>>;
    struct Listener(Ended);
    impl Drafter for Listener {
        fn propose(&mut self, _: &mut [DraftRequest<'_>]) -> Result<(), kvist_engine::Error> {
            Ok(())
        }
        fn removed(&mut self, id: u64, _: &str, tokens: &[u32], kept: usize) {
            self.0.lock().unwrap().push((id, tokens[kept..].to_vec()));
        }
        fn end(&mut self, id: u64, _: &str, tokens: &[u32], prompt: usize) {
            self.0.lock().unwrap().push((100 + id, tokens[prompt..].to_vec()));
        }
    }
    let ended = Ended::default();
    let mut chat = Chat::new(session(model(), &exact("cells", 512, 64)), None);
    chat.speculate(Speculator::new(vec![Box::new(Listener(ended.clone()))], SpeculationConfig::default()));
    let answers = |ended: &Ended| {
        let tokenizer = model().tokenizer().unwrap();
        let of = |(id, tokens): (u64, Vec<u32>)| (id, tokenizer.decode(&tokens).unwrap());
        ended.lock().unwrap().drain(..).map(of).collect::<Vec<_>>()
    };
    say(&mut chat, "Ownership is a set of rules that");
    chat.fork(None).unwrap();
    assert!(chat.undo());
    assert_eq!(answers(&ended), [(1, String::new())], "the answer is the other branch's too");
    chat.switch("main").unwrap();
    chat.drop_branch("branch-1").unwrap();
    assert_eq!(answers(&ended), [(101, String::new())]);
    chat.fork(None).unwrap();
    let left = say(&mut chat, " Rust also has").1;
    assert_eq!(answers(&ended), []);
    assert!(chat.undo());
    let [(id, text)] = &answers(&ended)[..] else { panic!("one answer was undone") };
    // The last token is not in the cache.
    assert!(*id == 2 && !text.is_empty() && left.starts_with(&text[..]), "{text:?} of {left:?}");
    assert!(chat.undo());
    assert_eq!(answers(&ended), [(2, String::new())], "what was undone before is not reported again");
    say(&mut chat, " The compiler checks");
    chat.switch("main").unwrap();
    chat.drop_branch("branch-2").unwrap();
    assert!(matches!(&answers(&ended)[..], [(102, text)] if !text.is_empty()));
}
