//! Two logs of JSON lines, off by default. The event log records all inputs; together with the configuration it
//! determines every decision. The decision log records the results. Both begin with a line that names the format
//! version and the configuration. The event log's first line also describes a paged cache, so that a replay needs
//! nothing but the log.
//!
//! The decision log contains batch membership changes and prompt chunks, but no decoded tokens. It is therefore the
//! same whether decode steps ran one by one or as a multi-step run.
mod cache_shape;
mod recording;

pub(crate) use cache_shape::CacheShape;
pub(crate) use recording::groups;
pub use recording::{GroupShape, Part, RECORDING_VERSION, Recorder, Recording};

use crate::config::Config;
use crate::drafts::BatchDrafts;
use crate::executor::Batch;
use crate::outcome::{Advance, Emitted, Outcome};
use crate::request::{Request, RequestId};
use crate::tiers::{NamedBlock, Run, TransferId};
use kvist_cache::{Kept, NodeId, SeqId};
use serde::{Deserialize, Serialize};
use std::fmt::Write;

/// Version of both formats.
pub const LOG_VERSION: u32 = 1;

/// A log of JSON lines, or nothing when logging is off.
#[derive(Default)]
pub struct Log {
    text: Option<String>,
}

impl Log {
    /// Starts the log with a line that names the format, its version, the configuration, and the cache layout if
    /// given.
    pub(crate) fn start(&mut self, format: &str, config: &Config, cache: Option<&CacheShape>) {
        let mut line = format!("{{\"format\":\"{format}\",\"version\":{LOG_VERSION}");
        line += &format!(",\"config\":{}", serde_json::to_string(config).unwrap_or_default());
        if let Some(cache) = cache {
            line += &format!(",\"cache\":{}", serde_json::to_string(cache).unwrap_or_default());
        }
        self.text = Some(line + "}\n");
    }
    /// Stops the log and discards its lines.
    pub(crate) fn stop(&mut self) {
        self.text = None;
    }
    pub(crate) fn is_on(&self) -> bool {
        self.text.is_some()
    }
    /// Returns the lines logged since the last call. Empty if the log is off.
    pub fn take(&mut self) -> String {
        self.text.as_mut().map(std::mem::take).unwrap_or_default()
    }
    fn line(&mut self, write: impl FnOnce(&mut String) -> std::fmt::Result) {
        if let Some(text) = &mut self.text {
            // Writing to a `String` does not fail.
            let _ = write(text);
            text.push('\n');
        }
    }

    pub(crate) fn arrive(&mut self, n: u64, at_ns: u64, request: &Request) {
        if self.is_on() {
            let request = serde_json::to_string(request).unwrap_or_default();
            self.line(|t| write!(t, "{{\"n\":{n},\"at\":{at_ns},\"arrive\":{request}}}"));
        }
    }
    pub(crate) fn cancel(&mut self, n: u64, at_ns: u64, id: RequestId) {
        self.line(|t| write!(t, "{{\"n\":{n},\"at\":{at_ns},\"cancel\":{id}}}"));
    }
    pub(crate) fn forget(&mut self, n: u64, at_ns: u64, salt: &str) {
        let salt = serde_json::to_string(salt).unwrap_or_default();
        self.line(|t| write!(t, "{{\"n\":{n},\"at\":{at_ns},\"forget\":{salt}}}"));
    }
    pub(crate) fn resize(&mut self, n: u64, at_ns: u64, capacity_tokens: &[u32]) {
        self.line(|t| write!(t, "{{\"n\":{n},\"at\":{at_ns},\"resize\":{capacity_tokens:?}}}"));
    }
    pub(crate) fn resized(&mut self, n: u64, at_ns: u64, moved: bool) {
        self.line(|t| write!(t, "{{\"n\":{n},\"at\":{at_ns},\"resized\":{moved}}}"));
    }
    pub(crate) fn found(&mut self, n: u64, at_ns: u64, id: RequestId, runs: &[Run]) {
        if self.is_on() {
            let runs = serde_json::to_string(runs).unwrap_or_default();
            self.line(|t| write!(t, "{{\"n\":{n},\"at\":{at_ns},\"found\":{id},\"runs\":{runs}}}"));
        }
    }
    /// `arrived` of the `asked` tokens were loaded. The line has their number if it is some of them.
    pub(crate) fn loaded(
        &mut self,
        n: u64,
        at_ns: u64,
        id: TransferId,
        asked: u32,
        arrived: u32,
        took_ns: u64,
    ) {
        let ok = arrived == asked;
        self.line(|t| {
            write!(t, "{{\"n\":{n},\"at\":{at_ns},\"loaded\":{id},\"ok\":{ok},\"took\":{took_ns}")?;
            match arrived {
                1.. if !ok => write!(t, ",\"tokens\":{arrived}}}"),
                _ => t.write_str("}"),
            }
        });
    }
    pub(crate) fn stored(&mut self, n: u64, at_ns: u64, id: TransferId, ok: bool) {
        self.line(|t| write!(t, "{{\"n\":{n},\"at\":{at_ns},\"stored\":{id},\"ok\":{ok}}}"));
    }
    pub(crate) fn unsaved(&mut self, n: u64, at_ns: u64, blocks: &[NamedBlock]) {
        if self.is_on() {
            let blocks = serde_json::to_string(blocks).unwrap_or_default();
            self.line(|t| write!(t, "{{\"n\":{n},\"at\":{at_ns},\"unsaved\":{blocks}}}"));
        }
    }
    pub(crate) fn idle(&mut self, n: u64, at_ns: u64, drafts: &BatchDrafts) {
        self.line(|t| {
            write!(t, "{{\"n\":{n},\"at\":{at_ns},\"idle\":true")?;
            write_drafts(t, drafts)?;
            t.write_str("}")
        });
    }
    pub(crate) fn abandoned(&mut self, n: u64, at_ns: u64, drafts: &BatchDrafts) {
        self.line(|t| {
            write!(t, "{{\"n\":{n},\"at\":{at_ns},\"abandoned\":true")?;
            write_drafts(t, drafts)?;
            t.write_str("}")
        });
    }
    /// If every request keeps its planned tokens, and those that sample emit one token per step, `sampled` is a list of
    /// token ids, with null where the id is unknown; `finished` has the indices of the entries that were the last
    /// token of their request. Otherwise `advances` has an object per request of the batch. `drafts` are those that were
    /// proposed for the batch, whether or not they fitted.
    pub(crate) fn outcome(
        &mut self,
        n: u64,
        at_ns: u64,
        batch: Batch<'_>,
        drafts: &BatchDrafts,
        outcome: &Outcome,
    ) {
        if !self.is_on() {
            return;
        }
        let steps = batch.steps;
        self.line(|t| {
            write!(t, "{{\"n\":{n},\"at\":{at_ns},\"steps\":{steps},\"elapsed\":{}", outcome.elapsed_ns)?;
            write_drafts(t, drafts)?;
            if outcome.failed {
                return t.write_str(",\"failed\":true}");
            }
            if !is_plain(batch, outcome) {
                let advances: Vec<LoggedAdvance> = outcome.advances().map(LoggedAdvance::of).collect();
                return write!(t, ",\"advances\":{}}}", serde_json::to_string(&advances).unwrap_or_default());
            }
            let samples = || batch.work.iter().zip(outcome.advances()).filter(|(work, _)| work.samples);
            t.write_str(",\"sampled\":[")?;
            for (i, (_, advance)) in samples().enumerate() {
                t.write_str(if i == 0 { "" } else { "," })?;
                match advance.emitted {
                    Emitted::Tokens(tokens) => write!(t, "{}", tokens[0])?,
                    Emitted::Unknown(_) => t.write_str("null")?,
                }
            }
            t.write_str("],\"finished\":[")?;
            let finished = samples().enumerate().filter(|(_, (_, advance))| advance.finished);
            for (n, (i, _)) in finished.enumerate() {
                write!(t, "{}{i}", if n == 0 { "" } else { "," })?;
            }
            t.write_str("]}")
        });
    }

    pub(crate) fn decide(&mut self, step: u64, at_ns: u64, decision: Decision<'_>) {
        self.line(|t| {
            write!(t, "{{\"step\":{step},\"at\":{at_ns},")?;
            match decision {
                Decision::Admit { id, seq, hit } => {
                    write!(t, "\"admit\":{id},\"seq\":{seq},\"hit\":{hit}}}")
                }
                Decision::Resume { id } => write!(t, "\"resume\":{id}}}"),
                Decision::Chunk { id, first, n } => {
                    write!(t, "\"chunk\":{id},\"first\":{first},\"tokens\":{n}}}")
                }
                Decision::Preempt { id, why, kept } => {
                    write!(t, "\"preempt\":{id},\"for\":\"{why}\",\"kept\":{kept}}}")
                }
                Decision::Drop { id, tokens } => write!(t, "\"drop\":{id},\"tokens\":{tokens}}}"),
                Decision::Evict { needed, freed } => {
                    write!(t, "\"make_room\":{needed},\"freed\":{freed}}}")
                }
                Decision::End { id, how, generated } => {
                    write!(t, "\"end\":{id},\"how\":\"{how}\",\"generated\":{generated}}}")
                }
                Decision::Failed => t.write_str("\"failed\":true}"),
                Decision::Load { id, seq, hit, tokens, runs } => {
                    let runs = serde_json::to_string(runs).unwrap_or_default();
                    write!(
                        t,
                        "\"load\":{id},\"seq\":{seq},\"hit\":{hit},\"tokens\":{tokens},\"runs\":{runs}}}"
                    )
                }
                Decision::Loaded { id, tokens } => write!(t, "\"loaded\":{id},\"tokens\":{tokens}}}"),
                Decision::NotLoaded { id, why } => write!(t, "\"not_loaded\":{id},\"why\":\"{why}\"}}"),
                Decision::Unretain { tokens } => write!(t, "\"unretain\":{tokens}}}"),
                Decision::Demote { blocks } => write!(t, "\"demote\":{blocks}}}"),
            }
        });
    }
}

/// Writes the drafts as `[index in the batch, request, [parents]]`; nothing if there are none.
fn write_drafts(t: &mut String, drafts: &BatchDrafts) -> std::fmt::Result {
    if drafts.is_empty() {
        return Ok(());
    }
    write!(t, ",\"drafts\":{}", serde_json::to_string(&drafts.logged()).unwrap_or_default())
}

/// Whether every request keeps all its planned tokens, and emits one token per step if it samples and none otherwise.
/// In a run of several steps the ids are unknown.
fn is_plain(batch: Batch<'_>, outcome: &Outcome) -> bool {
    batch.work.iter().zip(outcome.advances()).all(|(work, advance)| match (work.samples, advance.emitted) {
        _ if advance.kept != Kept::All => false,
        (true, Emitted::Tokens(tokens)) => batch.steps == 1 && tokens.len() == 1,
        (true, Emitted::Unknown(n)) => n == batch.steps,
        (false, emitted) => emitted.n_tokens() == 0 && !advance.finished,
    })
}

/// An [`Advance`] in the event log.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct LoggedAdvance {
    /// Length of the kept tokens, if not all are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kept: Option<u32>,
    /// The kept path, in a draft tree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    path: Option<Vec<u32>>,
    emitted: u32,
    /// Ids of the emitted tokens, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tokens: Option<Vec<u32>>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    finished: bool,
}

impl LoggedAdvance {
    fn of(advance: Advance<'_>) -> LoggedAdvance {
        LoggedAdvance {
            kept: if let Kept::First(n) = advance.kept { Some(n) } else { None },
            path: match advance.kept {
                Kept::Path(path) => Some(path.iter().map(|node| node.0).collect()),
                Kept::All | Kept::First(_) => None,
            },
            emitted: advance.emitted.n_tokens(),
            tokens: match advance.emitted {
                Emitted::Tokens(tokens) => Some(tokens.to_vec()),
                Emitted::Unknown(_) => None,
            },
            finished: advance.finished,
        }
    }

    /// Adds the advance to an outcome. `Err` says what is wrong with it.
    pub(crate) fn push_to(&self, outcome: &mut Outcome) -> Result<(), String> {
        let path: Vec<NodeId> = self.path.iter().flatten().copied().map(NodeId).collect();
        let kept = match (self.kept, &self.path) {
            (None, None) => Kept::All,
            (Some(n), None) => Kept::First(n),
            (None, Some(_)) => Kept::Path(&path),
            (Some(_), Some(_)) => return Err("an advance keeps a length or a path, not both".into()),
        };
        let emitted = match &self.tokens {
            None => Emitted::Unknown(self.emitted),
            Some(tokens) if tokens.len() == self.emitted as usize => Emitted::Tokens(tokens),
            Some(tokens) => {
                return Err(format!("an advance emits {} tokens and names {}", self.emitted, tokens.len()));
            }
        };
        outcome.push(Advance { kept, emitted, finished: self.finished });
        Ok(())
    }
}

/// A decision of the scheduler.
#[derive(Clone, Copy)]
pub(crate) enum Decision<'a> {
    Admit {
        id: RequestId,
        seq: SeqId,
        hit: u32,
    },
    /// A retained prompt of so many tokens gives way.
    Unretain {
        tokens: u32,
    },
    /// A paused request continues with its kept cache.
    Resume {
        id: RequestId,
    },
    Chunk {
        id: RequestId,
        first: u32,
        n: u32,
    },
    Preempt {
        id: RequestId,
        why: &'a str,
        kept: bool,
    },
    /// A paused request loses its kept cache.
    Drop {
        id: RequestId,
        tokens: u32,
    },
    Evict {
        needed: u32,
        freed: u32,
    },
    End {
        id: RequestId,
        how: &'a str,
        generated: u32,
    },
    Failed,
    /// Blocks are loaded from a tier into the sequence that the request uses from then on.
    Load {
        id: RequestId,
        seq: SeqId,
        hit: u32,
        tokens: u32,
        /// Where they are.
        runs: &'a [Run],
    },
    Loaded {
        id: RequestId,
        tokens: u32,
    },
    /// The tiers have tokens of a request, and they are computed.
    NotLoaded {
        id: RequestId,
        why: &'a str,
    },
    /// So many victims of eviction are evicted ahead of time, and copied to the tiers that lack them.
    Demote {
        blocks: u64,
    },
}
