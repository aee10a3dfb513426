//! An executor whose step times come from a cost model, and whose answers end as the trace says.
use super::watch::Watched;
use crate::cost::{BatchShape, StepCost};
use crate::report::StepCounts;
use crate::speculation::{Speculation, SpeculationCounts};
use crate::statistics::Histogram;
use kvist_cache::{Kept, Step};
use kvist_scheduler::{Advance, Batch, BatchDrafts, Emitted, Executor, Outcome, RequestId, Sampled};

/// Computes nothing; only accounts for time. Requests are named by ids that are unique among live ones.
pub(crate) struct SimExecutor<'c> {
    cost: &'c dyn StepCost,
    one_by_one: bool,
    note_itl: bool,
    /// By request id.
    answers: Vec<Answer>,
    /// A multi-step run must not pass this time. The driver sets it before every iteration.
    pub next_arrival_ns: u64,
    /// Durations of the steps counted by `max_fused_steps`, in order. `even_ns` instead if all of them cost the same.
    planned_ns: Vec<u64>,
    even_ns: Option<u64>,
    /// Start of each step of a run, relative to the run's start.
    begins_ns: Vec<u64>,
    /// True if the last step computed more than one token for any request.
    pub prefilled: bool,
    /// Blocks that the last multi-step run began after its first step, and the sum of the delays after which each was
    /// begun.
    pub late_blocks: u64,
    pub late_ns: u128,
    block_tokens: u32,
    pub counts: StepCounts,
    /// How it speculates, and what that has achieved; `None`: it does not.
    pub speculation: Option<(Speculation, SpeculationCounts)>,
    /// True if drafts were proposed for the next step.
    drafted: bool,
    pub itl_ns: Histogram,
    pub(super) watched: Option<Watched>,
    /// Requests that generated their first token since the driver last took the list; `None`: not noted.
    pub first_tokens: Option<Vec<RequestId>>,
}

#[derive(Clone, Copy)]
struct Answer {
    tokens_left: u32,
    /// Time of its last token; `u64::MAX` before the first.
    last_token_ns: u64,
}

impl<'c> SimExecutor<'c> {
    /// `block_tokens`: tokens per block, at least 1.
    pub fn new(cost: &'c dyn StepCost, block_tokens: u32, one_by_one: bool, note_itl: bool) -> Self {
        SimExecutor {
            cost,
            one_by_one,
            note_itl,
            answers: Vec::new(),
            next_arrival_ns: u64::MAX,
            planned_ns: Vec::new(),
            even_ns: None,
            begins_ns: Vec::new(),
            prefilled: false,
            late_blocks: 0,
            late_ns: 0,
            block_tokens: block_tokens.max(1),
            counts: StepCounts::default(),
            speculation: None,
            drafted: false,
            itl_ns: Histogram::default(),
            watched: None,
            first_tokens: None,
        }
    }
}

impl SimExecutor<'_> {
    /// Request `id` will generate `tokens` tokens. The scheduler refuses a request for zero tokens; if `max_new` is given,
    /// such a request gets one token instead.
    pub fn begin(&mut self, id: u64, tokens: u32) {
        let answer = Answer { tokens_left: tokens.max(1), last_token_ns: u64::MAX };
        let at = id as usize;
        if self.answers.len() <= at {
            self.answers.resize(at + 1, answer);
        }
        self.answers[at] = answer;
    }

    /// How long `steps` steps take of the multi-step run that `max_fused_steps` was asked for last, in nanoseconds.
    pub fn run_ns(&self, steps: u32) -> u64 {
        match self.even_ns {
            Some(ns) => ns.saturating_mul(steps.into()),
            None => self.planned_ns.iter().take(steps as usize).fold(0, |sum, ns| sum.saturating_add(*ns)),
        }
    }

    /// Records when the sequences of a multi-step decode run begin new blocks, that is, when a position is the first
    /// in a block.
    fn note_growth(&mut self, batch: &Batch<'_>) {
        let block = u64::from(self.block_tokens);
        let steps = u64::from(batch.steps);
        if self.even_ns.is_none() {
            let mut at_ns = 0u64;
            self.begins_ns.clear();
            for ns in &self.planned_ns[..batch.steps as usize] {
                self.begins_ns.push(at_ns);
                at_ns = at_ns.saturating_add(*ns);
            }
        }
        for work in batch.work {
            // Steps of the run, counted from 0, that begin a block: `first`, `first` + block, …; blocks begun in the
            // run's first step are not late.
            let first = block - u64::from(work.first) % block;
            if first >= steps {
                continue;
            }
            let n = (steps - 1 - first) / block + 1;
            self.late_blocks += n;
            self.late_ns += match self.even_ns {
                Some(ns) => u128::from(n * first + block * (n * (n - 1) / 2)) * u128::from(ns),
                None => {
                    let begins = self.begins_ns.iter().skip(first as usize).step_by(block as usize);
                    begins.map(|&ns| u128::from(ns)).sum()
                }
            };
        }
    }

    /// Tokens that `work[i]`, which samples, generates in this batch, and how many of its tokens are drafts.
    fn generated(&mut self, batch: &Batch<'_>, i: usize) -> (u32, u32) {
        let work = &batch.work[i];
        let drafted = batch.draft(i).len().saturating_sub(1) as u32;
        let Some((speculation, counts)) = self.speculation.as_mut().filter(|_| work.decodes) else {
            return (batch.steps, drafted);
        };
        let accepted = speculation.accepted(work.request.0, work.first, drafted);
        let generated = (1 + accepted).min(self.answers[work.request.0 as usize].tokens_left);
        counts.add(drafted, generated);
        (generated, drafted)
    }
}

impl Executor for SimExecutor<'_> {
    /// Steps until an answer ends, or up to the first step by whose end a request has arrived.
    fn max_fused_steps(&mut self, now_ns: u64, batch: Batch<'_>, limit: u32) -> u32 {
        self.planned_ns.clear();
        if self.one_by_one || self.speculation.is_some() || self.cost.window().is_some() {
            return 1;
        }
        let mut shape = BatchShape::default();
        let mut limit = limit;
        for work in batch.work {
            shape.add_decode(work.first.into());
            limit = limit.min(self.answers[work.request.0 as usize].tokens_left);
        }
        self.even_ns = self.cost.even_decode_ns(&shape);
        if let Some(ns) = self.even_ns {
            let until_arrival = self.next_arrival_ns.saturating_sub(now_ns).div_ceil(ns.max(1));
            return u32::try_from(until_arrival).unwrap_or(u32::MAX).clamp(1, limit);
        }
        let mut end_ns = now_ns;
        while (self.planned_ns.len() as u32) < limit {
            let ns = self.cost.step_ns(&shape);
            self.planned_ns.push(ns);
            end_ns = end_ns.saturating_add(ns);
            if end_ns >= self.next_arrival_ns {
                break;
            }
            shape = shape.next_decode();
        }
        self.planned_ns.len() as u32
    }

    /// A chain for every request that decodes. If the budget is short, each gets an equal share of what is left.
    fn draft(&mut self, _: u64, batch: Batch<'_>, limit: u32, drafts: &mut BatchDrafts) {
        let Some((speculation, _)) = &self.speculation else { return };
        let mut left = limit;
        let mut parents: Vec<Option<u32>> = Vec::new();
        let decoding: Vec<usize> = (0..batch.work.len()).filter(|&i| batch.work[i].decodes).collect();
        for (n, &i) in decoding.iter().enumerate() {
            let share = left.div_ceil((decoding.len() - n) as u32);
            let wanted = speculation.drafted(batch.work[i].request.0, batch.work[i].first);
            let n_tokens = wanted.min(batch.max_new(i).saturating_sub(1)).min(share);
            left -= n_tokens;
            parents.clear();
            parents.extend((0..n_tokens).map(|node| node.checked_sub(1)));
            drafts.push(i, &parents);
        }
        self.drafted = !drafts.is_empty();
    }

    fn execute(&mut self, now_ns: u64, _: Step<'_>, batch: Batch<'_>, out: &mut Outcome) {
        let n_sequences = batch.work.len() as u64;
        let first_ns;
        self.prefilled = false;
        (self.late_blocks, self.late_ns) = (0, 0);
        if batch.steps > 1 {
            self.note_growth(&batch);
            let later = u64::from(batch.steps) - 1;
            if let Some(ns) = self.even_ns {
                (first_ns, out.elapsed_ns) = (ns, ns.saturating_mul(later + 1));
                if self.note_itl {
                    self.itl_ns.record_n(ns, n_sequences * later);
                }
            } else {
                let run = &self.planned_ns[..batch.steps as usize];
                (first_ns, out.elapsed_ns) =
                    (run[0], run.iter().fold(0, |sum: u64, ns| sum.saturating_add(*ns)));
                if self.note_itl {
                    run[1..].iter().for_each(|&ns| self.itl_ns.record_n(ns, n_sequences));
                }
            }
            self.counts.decode_tokens += n_sequences * u64::from(batch.steps);
        } else {
            let shape = BatchShape::of_windowed(&batch, self.cost.window());
            self.prefilled = shape.prefill_sequences > 0;
            out.elapsed_ns = self.cost.step_ns(&shape);
            if let (Some((speculation, _)), true) = (&self.speculation, std::mem::take(&mut self.drafted)) {
                out.elapsed_ns = out.elapsed_ns.saturating_add(speculation.draft_ns);
            }
            first_ns = out.elapsed_ns;
            self.counts.prefill_tokens += shape.prefill_tokens;
            self.counts.decode_tokens += shape.decode_sequences;
        }
        let end_ns = now_ns.saturating_add(out.elapsed_ns);
        if let Some(watched) = &mut self.watched {
            batch.work.iter().for_each(|work| watched.note(work, now_ns, end_ns));
        }
        for (i, work) in batch.work.iter().enumerate() {
            if !work.samples {
                out.push_sampled(batch, None);
                continue;
            }
            let (generated, drafted) = self.generated(&batch, i);
            let answer = &mut self.answers[work.request.0 as usize];
            if self.note_itl && answer.last_token_ns != u64::MAX {
                self.itl_ns.record(now_ns.saturating_add(first_ns).saturating_sub(answer.last_token_ns));
            }
            if let (u64::MAX, Some(first_tokens)) = (answer.last_token_ns, &mut self.first_tokens) {
                first_tokens.push(work.request);
            }
            answer.last_token_ns = end_ns;
            answer.tokens_left = answer.tokens_left.saturating_sub(generated);
            let finished = answer.tokens_left == 0;
            if drafted == 0 {
                out.push_sampled(batch, Some(Sampled { token: None, finished }));
                continue;
            }
            // Accepted drafts and the token after them come at the same time.
            let later = generated - 1;
            self.counts.decode_tokens += u64::from(later);
            if self.note_itl {
                self.itl_ns.record_n(0, later.into());
            }
            let emitted = Emitted::Unknown(generated);
            out.push(Advance { kept: Kept::First(generated), emitted, finished });
        }
        self.counts.steps += u64::from(batch.steps);
        self.counts.busy_ns = self.counts.busy_ns.saturating_add(out.elapsed_ns);
    }
}
