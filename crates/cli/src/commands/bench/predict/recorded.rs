//! The requests of a trace, made small enough for this machine.
//!
//! Prompts, answers and what prompts share shrink by one factor: a request still shares the same part of its prompt with the same
//! requests. The trace's distances in time are stretched to the wanted rate, so its bursts stay.
use super::load::at_fixed_times;
use crate::commands::bench::calibrate::steps::token;
use crate::options::wrong_usage;
use anyhow::ensure;
use clap::ValueHint;
use kvist_cache::Prompt;
use kvist_simulator::request::Request;
use kvist_simulator::trace::{ReadOptions, Trace};
use std::path::{Path, PathBuf};
use std::str::FromStr;

#[derive(clap::Args)]
pub struct RecordedArgs {
    /// Serve the requests of this trace, from its beginning, instead of drawn ones: any that `kvist simulate --trace` reads. Its
    /// distances in time are scaled to --busy. Prompts are made from its ids, and share what these share
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with_all = ["chats", "seconds", "seed"])]
    load: Option<PathBuf>,
    /// One token for so many of the trace, in prompts, in answers and in what they share
    #[arg(long, value_name = "1/N", default_value = "1/1", requires = "load")]
    scale_tokens: Scale,
}

/// One token for so many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Scale(u32);

impl FromStr for Scale {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let n = text.strip_prefix("1/").and_then(|n| n.parse().ok()).filter(|n| *n > 0);
        n.map(Scale).ok_or_else(|| format!("`{text}` is not a scale: write it as 1/16"))
    }
}

/// What requests must fit into.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Of a prompt and its answer. Longer requests are cut.
    pub longest_tokens: u32,
    /// Token ids are below this.
    pub vocab: u32,
    pub most_requests: u32,
}

/// The requests of a trace.
pub struct Recorded {
    /// In order of arrival, from 0 on. Their contents are tokens.
    requests: Vec<Request>,
    name: String,
    scale: Scale,
    n_cut: usize,
    longest_tokens: u32,
}

impl RecordedArgs {
    /// The first `n` requests of the trace, or all; `None` without one.
    ///
    /// # Errors
    /// The trace cannot be read, its texts cannot be scaled so, or its requests all arrive at once.
    pub fn read(&self, n: Option<u32>, limits: Limits) -> anyhow::Result<Option<Recorded>> {
        let Some(file) = &self.load else { return Ok(None) };
        let most = n.unwrap_or(limits.most_requests.saturating_add(1));
        let options = ReadOptions { limit: Some(most as usize), ..ReadOptions::default() };
        let trace = Trace::read(file, &options)?;
        ensure!(
            trace.requests.len() <= limits.most_requests as usize,
            "{} has more than {} requests: give --requests",
            file.display(),
            limits.most_requests
        );
        let mut requests = trace.into_arrival_order();
        at_fixed_times(&mut requests);
        Recorded::new(file, requests, self.scale_tokens, limits).map(Some)
    }
}

impl Recorded {
    /// `requests`: of `file`, in order of arrival, without parents.
    fn new(
        file: &Path,
        mut requests: Vec<Request>,
        scale: Scale,
        limits: Limits,
    ) -> anyhow::Result<Recorded> {
        let first_ns = requests.first().map_or(0, |request| request.arrival_ns);
        let mut n_cut = 0;
        for request in &mut requests {
            request.arrival_ns -= first_ns;
            let tokens = scaled(request, scale, limits.vocab)
                .map_err(|problem| wrong_usage(format!("{}: {problem}", file.display())))?;
            // The simulator would heed them, and the engine is not told of them.
            (request.deadline_ns, request.priority) = (None, 0);
            let (prompt, output) = (tokens.len() as u32, request.output_tokens.div_ceil(scale.0));
            request.output_tokens = output.min(limits.longest_tokens / 4).max(1);
            request.prompt_tokens = prompt.min(limits.longest_tokens - request.output_tokens);
            n_cut += usize::from((request.prompt_tokens, request.output_tokens) != (prompt, output));
            request.content = Prompt::SharedTokens(tokens[..request.prompt_tokens as usize].into());
        }
        ensure!(
            requests.last().is_some_and(|request| request.arrival_ns > 0),
            "{}: its {} requests arrive at once, so their distances cannot be scaled: give more --requests",
            file.display(),
            requests.len()
        );
        let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy().into_owned();
        Ok(Recorded { requests, name, scale, n_cut, longest_tokens: limits.longest_tokens })
    }

    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// The requests, so many per second on average.
    pub fn at_rate(&self, per_s: f64) -> Vec<Request> {
        let stretched = self.stretch(per_s);
        let at = |request: &Request| (request.arrival_ns as f64 * stretched) as u64;
        self.requests.iter().map(|request| Request { arrival_ns: at(request), ..request.clone() }).collect()
    }

    /// The time that a second of the trace takes at this rate.
    fn stretch(&self, per_s: f64) -> f64 {
        let span_ns = self.requests.last().map_or(1, |request| request.arrival_ns) as f64;
        self.requests.len() as f64 / per_s * 1e9 / span_ns
    }

    /// In words.
    pub fn text(&self, per_s: f64) -> String {
        let cut = match self.n_cut {
            0 => String::new(),
            n => format!("; {n} were longer than {} tokens, and cut", self.longest_tokens),
        };
        format!(
            "the first {} requests of {}, one token for {} of its own, times × {:.3}{cut}",
            self.requests.len(),
            self.name,
            self.scale.0,
            self.stretch(per_s)
        )
    }
}

/// The tokens of a prompt: one for `scale` of the trace.
fn scaled(request: &Request, Scale(n): Scale, vocab: u32) -> Result<Vec<u32>, String> {
    let n_tokens = request.prompt_tokens.div_ceil(n);
    let tokens: Vec<u32> = match &request.content {
        Prompt::Ids { ids, tokens_per_id, .. } => {
            if !tokens_per_id.is_multiple_of(n) {
                return Err(format!(
                    "one of its ids stands for {tokens_per_id} tokens, which --scale-tokens 1/{n} does not divide: what \
                     requests share would not shrink as they do"
                ));
            }
            let of_id = |id: &u64| {
                let id = *id;
                (0..tokens_per_id / n).map(move |i| token(id, i, vocab))
            };
            ids.iter().flat_map(of_id).take(n_tokens as usize).collect()
        }
        Prompt::Tokens(_) | Prompt::SharedTokens(_) => {
            let tokens = request.content.tokens().unwrap_or_default();
            let tokens: Vec<u32> =
                tokens.iter().copied().step_by(n as usize).take(n_tokens as usize).collect();
            if let Some(token) = tokens.iter().find(|token| **token >= vocab) {
                return Err(format!("token {token} is not one of this model, which has {vocab}"));
            }
            tokens
        }
        // It shares nothing.
        Prompt::Unknown => (0..n_tokens).map(|i| token(u64::MAX - request.id, i, vocab)).collect(),
    };
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvist_cache::evict::Parameters;
    use kvist_simulator::zero_service::{BlockStream, TouchOrder, replay};
    use kvist_testing::SplitMix64;

    const LIMITS: Limits = Limits { longest_tokens: 4096, vocab: 50_000, most_requests: 100 };

    fn recorded(requests: Vec<Request>, n: u32) -> anyhow::Result<Recorded> {
        Recorded::new(Path::new("folder/t.jsonl"), requests, Scale(n), LIMITS)
    }

    fn of_ids(id: u64, ids: Vec<u64>, n_tokens: u32, output_tokens: u32) -> Request {
        let content = Prompt::Ids { ids: ids.into(), tokens_per_id: 512, n_tokens };
        Request { content, ..Request::new(id, id * 3_000_000_000, n_tokens, output_tokens) }
    }

    /// Chats behind one system prompt, as Mooncake writes them: an id stands for up to 512 tokens and all before them.
    fn chats(seed: u64) -> Vec<Request> {
        let mut rng = SplitMix64(seed);
        let mut known: Vec<Vec<u64>> = vec![vec![0]; 4];
        let mut next_id = 1;
        let mut requests = Vec::new();
        for id in 0..60 {
            let chat = rng.index(4);
            for _ in 0..rng.below(5) {
                known[chat].push(next_id);
                next_id += 1;
            }
            // The last id is of a part of its tokens, and of no other request.
            let ids = [&known[chat][..], &[100_000 + id]].concat();
            let n_tokens = (ids.len() as u32 - 1) * 512 + 1 + rng.below(512);
            requests.push(of_ids(id, ids, n_tokens, 1 + rng.below(700)));
        }
        requests
    }

    /// The scaled prompts, in blocks of 512 / N tokens, hit where the trace's own ids hit, in a cache without bound and in a small
    /// one.
    #[test]
    fn scaled_prompts_share_what_the_ids_share() {
        for seed in 0..20 {
            let trace = chats(seed);
            for n in [1, 4, 64, 512] {
                let limits = Limits { longest_tokens: u32::MAX, ..LIMITS };
                let scaled = Recorded::new(Path::new("t"), trace.clone(), Scale(n), limits).unwrap();
                let hits = |requests: &[Request], block_tokens: u32, capacity: Option<u32>| {
                    let stream = BlockStream::of(requests, Some(block_tokens)).unwrap();
                    let policy = Parameters::default();
                    replay(&stream, "lru", &policy, capacity, TouchOrder::Reverse).unwrap().cache.hit_blocks
                };
                for capacity in [None, Some(40)] {
                    let expected = hits(&trace, 512, capacity);
                    assert!(expected > 0);
                    assert_eq!(
                        hits(&scaled.requests, 512 / n, capacity),
                        expected,
                        "{seed}, 1/{n}, {capacity:?}"
                    );
                }
                for (small, large) in scaled.requests.iter().zip(&trace) {
                    assert_eq!(small.prompt_tokens, large.prompt_tokens.div_ceil(n));
                    assert_eq!(small.output_tokens, large.output_tokens.div_ceil(n));
                }
                assert_eq!(scaled.n_cut, 0);
            }
        }
    }

    #[test]
    fn times_are_stretched_to_the_rate_and_texts_cut_to_the_limit() {
        let requests = vec![
            Request { arrival_ns: 5_000_000_000, ..of_ids(0, vec![1], 512, 8) },
            Request { arrival_ns: 6_000_000_000, ..of_ids(1, vec![1, 2], 1024, 100_000) },
            Request {
                arrival_ns: 9_000_000_000,
                deadline_ns: Some(1),
                priority: 7,
                ..of_ids(2, vec![1; 20], 10_240, 16)
            },
        ];
        let recorded = recorded(requests, 2).unwrap();
        let at: Vec<u64> = recorded.at_rate(0.5).iter().map(|request| request.arrival_ns).collect();
        assert_eq!(at, [0, 1_500_000_000, 6_000_000_000], "three requests in six seconds");
        let tokens = |request: &Request| (request.prompt_tokens, request.output_tokens);
        let lengths: Vec<_> = recorded.requests.iter().map(tokens).collect();
        assert_eq!(lengths, [(256, 4), (512, 1024), (4088, 8)]);
        for request in &recorded.requests {
            assert_eq!(request.content.known_tokens(), request.prompt_tokens);
            assert_eq!((request.deadline_ns, request.priority), (None, 0));
        }
        let text = recorded.text(0.5);
        for part in
            ["first 3 requests of t.jsonl", "one token for 2", "× 1.500", "; 2 were longer than 4096 tokens"]
        {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn a_text_without_ids_is_scaled_or_shares_nothing() {
        let at = |id: u64, content: Prompt, n_tokens: u32| Request {
            content,
            ..Request::new(id, id, n_tokens, 1)
        };
        let tokens = |tokens: &[u32]| Prompt::SharedTokens(tokens.into());
        let scaled =
            recorded(vec![at(0, tokens(&[5, 6, 7, 8]), 4), at(1, tokens(&[5, 6, 7, 9, 1]), 5)], 2).unwrap();
        let texts: Vec<_> =
            scaled.requests.iter().map(|request| request.content.tokens().unwrap().to_vec()).collect();
        assert_eq!(texts, [vec![5, 7], vec![5, 7, 1]]);
        let unknown = recorded(vec![at(0, Prompt::Unknown, 40), at(1, Prompt::Unknown, 40)], 2).unwrap();
        let texts: Vec<_> =
            unknown.requests.iter().map(|request| request.content.tokens().unwrap().to_vec()).collect();
        assert_eq!(texts[0].len(), 20);
        assert_ne!(texts[0], texts[1]);
    }

    #[test]
    fn what_cannot_be_scaled_is_refused_with_the_reason() {
        let pair = |first: Request| vec![first, of_ids(1, vec![1], 512, 8)];
        let tokens = Request { content: Prompt::SharedTokens([50_000].into()), ..Request::new(0, 0, 1, 1) };
        for (requests, n, words) in [
            (pair(of_ids(0, vec![1], 512, 8)), 3, &["t.jsonl", "512 tokens", "--scale-tokens 1/3"][..]),
            (pair(tokens), 1, &["t.jsonl", "token 50000", "50000"]),
            (vec![of_ids(0, vec![1], 512, 8); 2], 1, &["t.jsonl", "2 requests arrive at once", "--requests"]),
        ] {
            let refused = recorded(requests, n).err().unwrap().to_string();
            assert!(words.iter().all(|word| refused.contains(word)), "{refused}");
        }
        for text in ["16", "1/0", "1/-2", "2/1", "1/x", ""] {
            assert!(text.parse::<Scale>().is_err(), "{text}");
        }
        assert_eq!("1/16".parse(), Ok(Scale(16)));
    }
}
