//! Shared content of requests: prefixes, chats, agents.
use super::arrivals::exponential;
use super::{BadParameter, Lengths, Random, at_most};
use crate::request::Request;
use kvist_cache::Prompt;
use rand::Rng;
use rand_distr::weighted::WeightedIndex;
use std::sync::Arc;

/// How the requests of a workload share content.
#[derive(Clone, Debug, PartialEq)]
pub enum Contents {
    /// Only the number of tokens is known. Never matches a prefix.
    Unknown,
    /// Every request, or a share of them, begins with one of a few prefixes.
    Prefixes(Prefixes),
    /// Every arrival is a chat of several turns.
    Chats(Chats),
    /// Every arrival is an agent that sends further requests, which may do the same.
    Agents(Agents),
}

/// Shared prefixes (system prompts, documents) whose popularity follows a power law of their rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Prefixes {
    pub n_prefixes: u32,
    /// Popularity ∝ rank^-exponent; with 0 all prefixes are equally popular.
    pub exponent: f64,
    pub prefix_tokens: u32,
    /// The share of requests that begin with a prefix, from 0 to 1. The others are as long, and share nothing.
    pub share: f64,
    /// Whether the prefix is followed by a prompt of the request's own. If not, the prefix is the whole prompt.
    pub own_prompt: bool,
    pub tokens_per_id: u32,
}

/// A chat: each turn's prompt is the whole conversation so far plus what the user adds. The user thinks between turns.
#[derive(Clone, Debug, PartialEq)]
pub struct Chats {
    /// Number of turns in a chat.
    pub turns: Lengths,
    /// Mean think time between an answer and the next turn, exponentially distributed. Seconds; 0 for none.
    pub think_s: f64,
    /// Tokens of the system prompt, the same for all chats.
    pub system_tokens: u32,
    pub tokens_per_id: u32,
}

/// An agent: when a request finishes, `fan_out` requests follow at once. Each has its parent's prompt and answer plus
/// a task of its own, down to `depth` generations below the first.
#[derive(Clone, Debug, PartialEq)]
pub struct Agents {
    pub fan_out: u32,
    pub depth: u32,
    /// Tokens of the system prompt, the same for all trees.
    pub system_tokens: u32,
    pub tokens_per_id: u32,
}

/// A chat or an agent ends early if its context would exceed this.
const MAX_TOKENS: u64 = 1 << 24;
const TOKENS: &str = "at most 16777216 tokens";
/// Maximum number of prefixes; each takes 8 bytes.
const MAX_PREFIXES: u32 = 10_000_000;
/// Maximum mean think time, about 30 years.
const MAX_THINK_S: f64 = 1e9;
/// Maximum ids of the system prompt, summed over all requests of a tree, because each request stores them.
const MAX_IDS: u64 = 1 << 27;
/// Maximum requests in one agent's tree.
const MAX_REQUESTS: u64 = 1 << 20;

impl Contents {
    pub(super) fn check(&self) -> Result<(), BadParameter> {
        let ids = |tokens_per_id: u32| match tokens_per_id {
            0 => Err(BadParameter::new("the tokens per id", 0, "at least 1")),
            _ => Ok(()),
        };
        let system = |tokens: u32| match u64::from(tokens) > MAX_TOKENS {
            true => Err(BadParameter::new("the length of system prompts", tokens, TOKENS)),
            false => Ok(()),
        };
        match self {
            Contents::Unknown => Ok(()),
            Contents::Prefixes(prefixes) => {
                ids(prefixes.tokens_per_id)?;
                check_popularity(prefixes.n_prefixes, prefixes.exponent)?;
                if prefixes.prefix_tokens == 0 || u64::from(prefixes.prefix_tokens) > MAX_TOKENS {
                    let found = prefixes.prefix_tokens;
                    return Err(BadParameter::new("the length of prefixes", found, "1 to 16777216 tokens"));
                }
                if !(0.0..=1.0).contains(&prefixes.share) {
                    let found = prefixes.share;
                    return Err(BadParameter::new("the share of requests with a prefix", found, "0 to 1"));
                }
                Ok(())
            }
            Contents::Chats(chats) => {
                ids(chats.tokens_per_id)?;
                system(chats.system_tokens)?;
                chats.turns.check("the number of turns")?;
                if chats.think_s == 0.0 {
                    return Ok(());
                }
                at_most("the time to think", chats.think_s, MAX_THINK_S, "at most 1000000000 seconds")
            }
            Contents::Agents(agents) => {
                ids(agents.tokens_per_id)?;
                system(agents.system_tokens)?;
                let (mut generation, mut n_requests) = (1u64, 1u64);
                for _ in 0..agents.depth {
                    generation = generation.saturating_mul(u64::from(agents.fan_out));
                    n_requests = n_requests.saturating_add(generation);
                    if generation == 0 || n_requests > MAX_REQUESTS {
                        break;
                    }
                }
                if n_requests > MAX_REQUESTS {
                    let found = format!("{} to a depth of {}", agents.fan_out, agents.depth);
                    return Err(BadParameter::new("the fan-out", found, "at most 1048576 requests per tree"));
                }
                let n_ids = u64::from(agents.system_tokens / agents.tokens_per_id) * n_requests;
                if n_ids > MAX_IDS {
                    let found = format!("{} tokens for {n_requests} requests per tree", agents.system_tokens);
                    let expected = "at most 134217728 ids per tree: give fewer tokens, more tokens per id, or a smaller tree";
                    return Err(BadParameter::new("the system prompt", found, expected));
                }
                Ok(())
            }
        }
    }
}

fn check_popularity(n_prefixes: u32, exponent: f64) -> Result<(), BadParameter> {
    if n_prefixes == 0 {
        return Err(BadParameter::new("the number of prefixes", n_prefixes, "at least 1"));
    }
    if n_prefixes > MAX_PREFIXES {
        return Err(BadParameter::new("the number of prefixes", n_prefixes, "at most 10000000"));
    }
    if !exponent.is_finite() || exponent < 0.0 {
        return Err(BadParameter::new("Zipf's exponent", exponent, "a finite number, at least 0"));
    }
    Ok(())
}

/// Ranks from 0 with probability ∝ (rank + 1)^-exponent (Zipf, "Human Behavior and the Principle of Least Effort",
/// 1949), as a table, which is exact for every exponent.
fn zipf(n: u32, exponent: f64) -> WeightedIndex<f64> {
    let weights = (1..=n).map(|rank| f64::from(rank).powf(-exponent));
    WeightedIndex::new(weights).expect("the first weight is 1 and none is negative")
}

/// Ids with this bit are shared by all trees of a workload. Ids without it belong to one request and its follow-ups.
const SHARED: u64 = 1 << 63;

/// Turns arrivals into requests.
pub(super) struct RequestGenerator<'a> {
    contents: &'a Contents,
    random: Random,
    popularity: Option<WeightedIndex<f64>>,
    next_id: u64,
}

type DrawTokens<'a> = &'a mut dyn FnMut() -> u32;

impl<'a> RequestGenerator<'a> {
    pub fn new(contents: &'a Contents, random: Random) -> Result<Self, BadParameter> {
        contents.check()?;
        let popularity = match contents {
            Contents::Prefixes(prefixes) => Some(zipf(prefixes.n_prefixes, prefixes.exponent)),
            _ => None,
        };
        Ok(RequestGenerator { contents, random, popularity, next_id: 0 })
    }

    /// Appends the request, or the tree of requests, that arrives now.
    pub fn generate(
        &mut self,
        arrival_ns: u64,
        prompt: DrawTokens<'_>,
        output: DrawTokens<'_>,
        requests: &mut Vec<Request>,
    ) {
        match self.contents {
            Contents::Unknown => {
                let id = requests.len() as u64;
                requests.push(Request::new(id, arrival_ns, prompt(), output()));
            }
            Contents::Prefixes(prefixes) => {
                let own = if prefixes.own_prompt { prompt() } else { 0 };
                let n_prompt = prefixes.prefix_tokens.saturating_add(own);
                let rank = self.popularity.as_ref().map_or(0, |popularity| self.random.sample(popularity));
                // Nothing is drawn where all requests share: descriptions without a share give what they gave before.
                let shares = prefixes.share >= 1.0 || self.random.random::<f64>() < prefixes.share;
                let per_prefix = u64::from(prefixes.prefix_tokens.div_ceil(prefixes.tokens_per_id));
                let mut request = Request::new(requests.len() as u64, arrival_ns, n_prompt, output());
                // If the request has a prompt of its own, the id that contains the end of the prefix is the request's
                // own. If not, the output would share that id with other requests, so the output stays unknown.
                let (shared, n_known) = if !shares {
                    (0, request.total_tokens())
                } else if prefixes.own_prompt {
                    (u64::from(prefixes.prefix_tokens / prefixes.tokens_per_id), request.total_tokens())
                } else {
                    (per_prefix, u64::from(n_prompt))
                };
                let first = rank as u64 * per_prefix;
                let mut ids: Vec<u64> = (first..first + shared).map(|id| SHARED | id).collect();
                self.cover(&mut ids, n_known, prefixes.tokens_per_id);
                request.content = known(ids.into(), prefixes.tokens_per_id, n_known);
                requests.push(request);
            }
            Contents::Chats(chats) => self.chat(chats, arrival_ns, prompt, output, requests),
            Contents::Agents(agents) => {
                let ids = system_ids(agents.system_tokens, agents.tokens_per_id);
                let root = Node { parent: None, ids, tokens: u64::from(agents.system_tokens) };
                let mut generation = vec![root];
                for depth in 0..=agents.depth {
                    let mut next = Vec::new();
                    for node in &generation {
                        let n = if depth == 0 { 1 } else { agents.fan_out };
                        for _ in 0..n {
                            next.extend(self.ask(node, agents, arrival_ns, prompt, output, requests));
                        }
                    }
                    generation = next;
                }
            }
        }
    }

    fn chat(
        &mut self,
        chats: &Chats,
        arrival_ns: u64,
        prompt: DrawTokens<'_>,
        output: DrawTokens<'_>,
        requests: &mut Vec<Request>,
    ) {
        let n_turns = chats.turns.draw_tokens(&mut self.random);
        let begin = requests.len();
        let mut so_far = u64::from(chats.system_tokens);
        for turn in 0..n_turns {
            let (n_prompt, n_output) = (so_far + u64::from(prompt()), output());
            so_far = n_prompt + u64::from(n_output);
            if turn > 0 && so_far > MAX_TOKENS {
                break;
            }
            let id = requests.len() as u64;
            let n_prompt = u32::try_from(n_prompt).unwrap_or(u32::MAX);
            let mut request = Request::new(id, arrival_ns, n_prompt, n_output);
            if turn > 0 {
                request.parent = Some(id - 1);
                request.think_ns = (chats.think_s * exponential(&mut self.random) * 1e9).round() as u64;
            }
            requests.push(request);
        }
        // One id list for the whole chat; each turn uses a prefix of it.
        let mut ids = system_ids(chats.system_tokens, chats.tokens_per_id);
        let longest = requests.last().map_or(0, Request::total_tokens);
        self.cover(&mut ids, longest, chats.tokens_per_id);
        let ids: Arc<[u64]> = ids.into();
        for request in &mut requests[begin..] {
            request.content = known(ids.clone(), chats.tokens_per_id, request.total_tokens());
        }
    }

    /// Creates a request that continues `node`. Returns `None` and creates nothing if the context is too long for
    /// follow-ups.
    fn ask(
        &mut self,
        node: &Node,
        agents: &Agents,
        arrival_ns: u64,
        prompt: DrawTokens<'_>,
        output: DrawTokens<'_>,
        requests: &mut Vec<Request>,
    ) -> Option<Node> {
        let n_prompt = node.tokens + u64::from(prompt());
        let n_output = output();
        if node.parent.is_some() && n_prompt + u64::from(n_output) > MAX_TOKENS {
            return None;
        }
        let id = requests.len() as u64;
        let mut request = Request::new(id, arrival_ns, u32::try_from(n_prompt).unwrap_or(u32::MAX), n_output);
        request.parent = node.parent;
        // The id that contains the end of the parent's text continues differently in every child.
        let shared = (node.tokens / u64::from(agents.tokens_per_id)) as usize;
        let mut ids = node.ids[..shared.min(node.ids.len())].to_vec();
        self.cover(&mut ids, request.total_tokens(), agents.tokens_per_id);
        request.content = known(ids.as_slice().into(), agents.tokens_per_id, request.total_tokens());
        let tokens = request.total_tokens();
        requests.push(request);
        Some(Node { parent: Some(id), ids, tokens })
    }

    /// Appends new ids until they cover `n_tokens`.
    fn cover(&mut self, ids: &mut Vec<u64>, n_tokens: u64, tokens_per_id: u32) {
        for _ in ids.len() as u64..n_tokens.div_ceil(u64::from(tokens_per_id)) {
            ids.push(self.next_id);
            self.next_id += 1;
        }
    }
}

/// The context from which an agent's next request continues.
struct Node {
    parent: Option<u64>,
    ids: Vec<u64>,
    tokens: u64,
}

/// The whole ids of a system prompt that all trees share.
fn system_ids(system_tokens: u32, tokens_per_id: u32) -> Vec<u64> {
    (0..u64::from(system_tokens / tokens_per_id)).map(|at| SHARED | at).collect()
}

fn known(ids: Arc<[u64]>, tokens_per_id: u32, n_tokens: u64) -> Prompt {
    Prompt::Ids { ids, tokens_per_id, n_tokens: u32::try_from(n_tokens).unwrap_or(u32::MAX) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::statistics::{mean, variance};

    #[test]
    fn moments_of_zipf() {
        for (n, exponent) in [(1, 1.0), (10, 0.0), (100, 0.8), (1000, 1.2)] {
            let zipf = zipf(n, exponent);
            let weight = |rank: u32| f64::from(rank + 1).powf(-exponent);
            let total: f64 = (0..n).map(weight).sum();
            let m: f64 = (0..n).map(|r| f64::from(r) * weight(r) / total).sum();
            let v: f64 = (0..n).map(|r| (f64::from(r) - m).powi(2) * weight(r) / total).sum();
            let mut random = super::super::stream(23, 0);
            let drawn: Vec<f64> = (0..200_000).map(|_| random.sample(&zipf) as f64).collect();
            let (mean, variance) = (mean(&drawn).unwrap(), variance(&drawn).unwrap());
            assert!((mean - m).abs() <= 4.0 * (v / 200_000.0).sqrt(), "{n} {exponent}: mean {mean}, not {m}");
            assert!((variance - v).abs() <= 0.03 * v, "{n} {exponent}: variance {variance}, not {v}");
        }
        assert!(check_popularity(0, 1.0).is_err() && check_popularity(5, f64::NAN).is_err());
    }
}
