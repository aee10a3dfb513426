//! Replays a trace against an eviction policy with zero service time: an upper bound on what a cache of a given size
//! is worth.
//!
//! For each request, in list order if none waits for a parent, otherwise in order of arrival, where an answer takes no
//! time and only thinking does:
//! 1. *Look up*: the longest prefix of the request's blocks that is resident. These blocks are the hits.
//! 2. *Touch* every prompt block, including a partial last one: mark it used if it is resident, otherwise insert it,
//!    evicting one when full. [`TouchOrder::Reverse`] goes from tail to head, so that among the blocks a request
//!    touched its tail is evicted first.
//!
//! Nothing is pinned, outputs leave no blocks, and any block may be evicted, even a parent before its children: the
//! policies of `kvist_cache::evict` are driven directly, without the rules of a prefix index. The result is a bound
//! and a way to compare policies; it does not model a server. Content with only a token count is refused.
mod numbers;

use crate::request::Request;
use crate::run::Arrivals;
use kvist_cache::Prompt;
use kvist_cache::evict::{self, FlatEntries, Parameters, PolicyError, Use};
use numbers::Numbers;
use serde::Serialize;

/// Block size for content given as token ids, if none is specified.
const TOKEN_BLOCK: u32 = 16;

/// The blocks of a trace, numbered densely in order of first use.
///
/// Takes 4 bytes per block of a request and 24 per request.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockStream {
    block_tokens: u32,
    blocks: Vec<u32>,
    requests: Vec<RequestBlocks>,
    n_distinct: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct RequestBlocks {
    /// End of its blocks, which begin where those of the previous request end.
    end: usize,
    prompt_tokens: u32,
    now_ns: u64,
}

/// Why a trace cannot be cut into blocks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoBlocks {
    #[error(
        "request {request} has no content, so nothing can hit: replay a trace with hash ids or tokens (Mooncake, \
         Bailian, kvist's own)"
    )]
    Unknown { request: u64 },
    #[error(
        "request {request} has one id per {tokens_per_id} tokens, which do not make blocks of {block_tokens}: use a divisor or a multiple of {tokens_per_id}"
    )]
    BlockSize { request: u64, tokens_per_id: u32, block_tokens: u32 },
    #[error(
        "request {request} has one id per {tokens_per_id} tokens, and requests before it one per {before}: use one number in a trace"
    )]
    Mixed { request: u64, tokens_per_id: u32, before: u32 },
    #[error("blocks of 0 tokens: give at least 1")]
    Zero,
    #[error("more than 2^32 - 2 blocks: give larger blocks, or fewer requests")]
    TooMany,
}

/// The order in which a request touches its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TouchOrder {
    /// Tail to head.
    Reverse,
    /// Head to tail.
    Forward,
}

/// The result of a replay.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ZeroService {
    pub cache: Hits,
    pub policy: String,
    /// `None`: unbounded.
    pub capacity_blocks: Option<u32>,
    pub block_tokens: u32,
    pub touch_order: TouchOrder,
    pub requests: u64,
    /// Number of distinct blocks; an unbounded cache ends with this many.
    pub distinct_blocks: u32,
}

/// Hit counts at lookup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Hits {
    /// Blocks of the longest resident prefix, over all requests.
    pub hit_blocks: u64,
    pub total_blocks: u64,
    /// Resident blocks at any position, the prefix included.
    pub any_position_hit_blocks: u64,
    /// Requests with at least one hit block.
    pub hit_requests: u64,
    pub hit_tokens: u64,
    pub total_tokens: u64,
    /// Σ min(block tokens · hit blocks, prompt) ÷ Σ prompt; 0 without tokens.
    pub token_hit_ratio: f64,
    pub evicted_blocks: u64,
}

impl BlockStream {
    /// Cuts the prompts into blocks of `block_tokens`; by default one block per id (16 tokens for token ids).
    ///
    /// A finer block is identified by (id, index within the id's tokens). A coarser block is identified by its last
    /// id, which stands for all tokens before it. Requests with different salts share no block.
    ///
    /// # Errors
    /// [`NoBlocks`]
    pub fn of(requests: &[Request], block_tokens: Option<u32>) -> Result<BlockStream, NoBlocks> {
        let block_tokens = match block_tokens {
            Some(0) => return Err(NoBlocks::Zero),
            Some(n) => n,
            None => requests
                .iter()
                .find_map(|request| match request.content {
                    Prompt::Ids { tokens_per_id, .. } => Some(tokens_per_id),
                    _ => None,
                })
                .unwrap_or(TOKEN_BLOCK),
        };
        let mut numbers = Numbers::new(block_tokens);
        let mut stream =
            BlockStream { block_tokens, blocks: Vec::new(), requests: Vec::new(), n_distinct: 0 };
        for (now_ns, i) in in_order(requests) {
            let request = &requests[i];
            numbers.append(request, &mut stream.blocks)?;
            let end = stream.blocks.len();
            stream.requests.push(RequestBlocks { end, prompt_tokens: request.prompt_tokens, now_ns });
        }
        stream.n_distinct = numbers.distinct();
        Ok(stream)
    }

    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }
    /// Total blocks of all requests.
    pub fn total_blocks(&self) -> u64 {
        self.blocks.len() as u64
    }
    /// Number of distinct blocks.
    pub fn distinct_blocks(&self) -> u32 {
        self.n_distinct
    }
    pub fn total_tokens(&self) -> u64 {
        self.requests.iter().map(|r| u64::from(r.prompt_tokens)).sum()
    }

    fn requests(&self) -> impl DoubleEndedIterator<Item = (&RequestBlocks, &[u32])> {
        self.requests.iter().enumerate().map(|(i, request)| {
            let begin = if i == 0 { 0 } else { self.requests[i - 1].end };
            (request, &self.blocks[begin..request.end])
        })
    }

    /// The next use of each block of the stream, as request number and then position, so that among the blocks a
    /// request will use, its tail is farthest in the future. Hits are counted before anything is touched, so the touch
    /// order within a request does not matter here.
    fn next_uses(&self) -> Vec<Option<u64>> {
        let mut later: Vec<Option<u64>> = vec![None; self.n_distinct as usize];
        let mut next = vec![None; self.blocks.len()];
        for (number, (request, blocks)) in (0u64..).zip(self.requests()).collect::<Vec<_>>().into_iter().rev()
        {
            let begin = request.end - blocks.len();
            for (position, block) in blocks.iter().enumerate().rev() {
                let this = number << 32 | position as u64;
                next[begin + position] = later[*block as usize].replace(this);
            }
        }
        next
    }
}

/// When each request is looked up, and its place in the list. A turn follows its parent after the time to think: of chats
/// that were replayed one after the other, each would find all that it needs.
fn in_order(requests: &[Request]) -> Vec<(u64, usize)> {
    if requests.iter().all(|request| request.parent.is_none()) {
        let mut now_ns = 0;
        let at = |(i, request): (usize, &Request)| {
            now_ns = request.arrival_ns.max(now_ns); // a file need not be sorted, but time must not go back
            (now_ns, i)
        };
        return requests.iter().enumerate().map(at).collect();
    }
    let mut arrivals = Arrivals::new(requests);
    let mut order = Vec::with_capacity(requests.len());
    while let Some((at_ns, i)) = arrivals.pop(u64::MAX) {
        order.push((at_ns, i));
        arrivals.ended(i, at_ns);
    }
    order
}

/// Replays `stream` against the policy of this name in a cache of `capacity_blocks` (`None`: unbounded).
///
/// Every block has the same recompute cost and the same size. There is no rule here that leaves are evicted first, so
/// a policy that weighed depth would evict the heads, and nothing after an evicted head can hit. Time is that of the
/// trace.
///
/// # Errors
/// The policy is unknown, or has no such parameter.
pub fn replay(
    stream: &BlockStream,
    policy: &str,
    parameters: &Parameters,
    capacity_blocks: Option<u32>,
    touch_order: TouchOrder,
) -> Result<ZeroService, PolicyError> {
    let policy = evict::build(policy, parameters)?;
    let name = policy.name();
    // Only a policy that knows the future may reject a new block, and only such a policy reads the future.
    let future = if policy.bypasses() { stream.next_uses() } else { Vec::new() };
    // A block's number is its entry.
    let mut resident = FlatEntries::new(capacity_blocks.unwrap_or(u32::MAX), policy);
    let mut hits = Hits { total_blocks: stream.total_blocks(), ..Hits::default() };
    let mut at = Use { cost: 1.0, bytes: 1, ..Use::default() };
    for (request, blocks) in stream.requests() {
        let prefix = blocks.iter().take_while(|block| resident.contains(**block)).count();
        let beyond = blocks.iter().skip(prefix).filter(|block| resident.contains(**block)).count();
        let tokens = (prefix as u64 * u64::from(stream.block_tokens)).min(u64::from(request.prompt_tokens));
        hits.hit_blocks += prefix as u64;
        hits.any_position_hit_blocks += (prefix + beyond) as u64;
        hits.hit_requests += u64::from(prefix > 0);
        hits.hit_tokens += tokens;
        hits.total_tokens += u64::from(request.prompt_tokens);

        at.now_ns = request.now_ns;
        let begin = request.end - blocks.len();
        let mut touch = |position: usize| {
            at.tick += 1;
            at.next_use = future.get(begin + position).copied().flatten();
            let touched = resident.touch_or_insert(blocks[position], &at);
            hits.evicted_blocks += u64::from(touched.evicted.is_some());
        };
        match touch_order {
            TouchOrder::Reverse => (0..blocks.len()).rev().for_each(&mut touch),
            TouchOrder::Forward => (0..blocks.len()).for_each(&mut touch),
        }
    }
    if hits.total_tokens > 0 {
        hits.token_hit_ratio = hits.hit_tokens as f64 / hits.total_tokens as f64;
    }
    Ok(ZeroService {
        cache: hits,
        policy: name.into(),
        capacity_blocks,
        block_tokens: stream.block_tokens,
        touch_order,
        requests: stream.requests.len() as u64,
        distinct_blocks: stream.n_distinct,
    })
}
