//! The requests to serve.
use crate::commands::bench::calibrate::steps::token;
use kvist_cache::Prompt;
use kvist_simulator::request::Request;
use kvist_simulator::workload::{Arrivals, Chats, Contents, Lengths, Prefixes, Workload};
use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Tokens of a shared prefix, and how many there are.
const PREFIX_TOKENS: u32 = 128;
const N_PREFIXES: u32 = 12;
/// Mean length of a prompt after its prefix, and of an answer.
const PROMPT_TOKENS: u32 = 64;
const OUTPUT_TOKENS: u32 = 48;
/// Mean length of what a user adds in a turn of a chat, and the turns.
const TURN_TOKENS: u32 = 160;
const TURNS: (u32, u32) = (4, 10);
/// Assumed time of an answer: the next turn comes this much later than the user thinks.
const ANSWER_S: f64 = 2.0;

/// What is drawn.
#[derive(Clone, Copy)]
pub enum Kind {
    /// Single requests with popular prefixes.
    Prefixes,
    /// Chats of several turns. Turns come at fixed times, however long the answers before them take.
    Chats { think_s: f64 },
}

impl Kind {
    /// In words.
    pub fn text(self) -> String {
        match self {
            Kind::Prefixes => format!(
                "one of {N_PREFIXES} prefixes of {PREFIX_TOKENS} tokens and a prompt of its own ({PROMPT_TOKENS} on average, \
                 lognormal); answers of {OUTPUT_TOKENS} on average, lognormal"
            ),
            Kind::Chats { think_s } => format!(
                "chats of {} to {} turns, {think_s} s apart (exponential), behind a system prompt of {PREFIX_TOKENS} tokens; each \
                 turn adds {TURN_TOKENS} tokens and an answer of {OUTPUT_TOKENS}, on average, lognormal",
                TURNS.0, TURNS.1
            ),
        }
    }
}

/// `n_requests` requests with token ids below `vocab`, each of at most `longest` tokens. `per_s`: requests.
pub fn load(
    kind: Kind,
    per_s: f64,
    n_requests: usize,
    seed: u64,
    longest: u32,
    vocab: u32,
) -> anyhow::Result<Vec<Request>> {
    let lognormal = |mean: u32| Lengths::Lognormal { mean: f64::from(mean), variation: 1.0 };
    let (contents, prompt_tokens, arrivals_per_s) = match kind {
        Kind::Prefixes => {
            let prefixes = Prefixes {
                n_prefixes: N_PREFIXES,
                exponent: 1.0,
                prefix_tokens: PREFIX_TOKENS,
                share: 1.0,
                own_prompt: true,
                tokens_per_id: 16,
            };
            (Contents::Prefixes(prefixes), PROMPT_TOKENS, per_s)
        }
        Kind::Chats { think_s } => {
            let turns = Lengths::Uniform { min: TURNS.0, max: TURNS.1 };
            let chats = Chats { turns, think_s, system_tokens: PREFIX_TOKENS, tokens_per_id: 16 };
            (Contents::Chats(chats), TURN_TOKENS, per_s * 2.0 / f64::from(TURNS.0 + TURNS.1))
        }
    };
    let workload = Workload {
        n_requests,
        arrivals: Arrivals::Poisson { per_s: arrivals_per_s },
        prompt_tokens: lognormal(prompt_tokens),
        output_tokens: lognormal(OUTPUT_TOKENS),
        contents,
    };
    let mut requests = workload.generate(seed)?;
    at_fixed_times(&mut requests);
    for request in &mut requests {
        // An opaque id always becomes the same tokens.
        let Prompt::Ids { ids, tokens_per_id, .. } = &request.content else { continue };
        request.output_tokens = request.output_tokens.min(longest / 4);
        request.prompt_tokens = request.prompt_tokens.min(longest - request.output_tokens);
        let n = request.prompt_tokens as usize;
        let tokens = ids.iter().flat_map(|id| (0..*tokens_per_id).map(move |i| token(*id, i, vocab)));
        request.content = Prompt::SharedTokens(tokens.take(n).collect());
    }
    Ok(requests)
}

/// Turns that would follow an answer arrive a while after the turn before them.
pub fn at_fixed_times(requests: &mut [Request]) {
    let mut arrivals: HashMap<u64, u64> = HashMap::new();
    for request in requests.iter_mut() {
        if let Some(before) = request.parent.take().and_then(|parent| arrivals.get(&parent).copied()) {
            let after = before.saturating_add(request.think_ns).saturating_add((ANSWER_S * 1e9) as u64);
            request.arrival_ns = request.arrival_ns.max(after);
        }
        request.think_ns = 0;
        arrivals.insert(request.id, request.arrival_ns);
    }
    requests.sort_by_key(|request| request.arrival_ns);
    (0..).zip(requests).for_each(|(id, request)| request.id = id);
}

/// The tokens of all texts, each of a chat's prefixes once.
pub fn distinct_tokens(requests: &[Request], block_tokens: u32) -> u64 {
    let blocks = requests.iter().filter_map(|request| request.content.tokens()).flat_map(|tokens| {
        let ends = (1..=tokens.len() / block_tokens as usize).map(|n| n * block_tokens as usize);
        ends.scan((0u64, 0), |(hash, from), end| {
            let mut hasher = DefaultHasher::new();
            (*hash, &tokens[*from..end]).hash(&mut hasher);
            (*hash, *from) = (hasher.finish(), end);
            Some(*hash)
        })
    });
    blocks.collect::<HashSet<u64>>().len() as u64 * u64::from(block_tokens)
}
