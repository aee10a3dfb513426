//! The wanted rows of a step and their results: logits, the most likely tokens, or a token that the device has chosen.
use crate::mass::AttentionMass;
use crate::sampling::{HostSampler, NoToken, SampleParams, argmax};
use std::ops::Range;

/// What a step returns for a wanted row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RowOutput {
    /// The logits, `[vocab]`.
    Logits,
    /// The K most likely tokens and their logits.
    TopK(u32),
    /// The most likely token; of several, the lowest.
    Argmax,
    /// A token drawn with these parameters.
    Sample(SampleParams),
}

/// A wanted row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WantedRow {
    /// Index of the token in the batch.
    pub row: u32,
    pub output: RowOutput,
}

impl WantedRow {
    /// The logits of this row.
    pub const fn logits(row: u32) -> Self {
        WantedRow { row, output: RowOutput::Logits }
    }
}

/// The result of a wanted row.
#[derive(Debug, PartialEq)]
pub enum RowResult<'a> {
    /// `[vocab]`, which a sampler may modify.
    Logits(&'a mut [f32]),
    /// Tokens and their logits: the most likely first, equal ones in order of their ids. All tokens if there are fewer
    /// than were asked for.
    TopK(&'a [(u32, f32)]),
    /// Of [`RowOutput::Argmax`] and [`RowOutput::Sample`].
    Token(u32),
    /// The row gives no token.
    Failed(NoToken),
}

/// The result of a wanted row from a device that computes results itself. See [`StepOutput::answer_from`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DeviceRow<'a> {
    /// The row's logits, `[vocab]`, from which the host computes what the row asks for.
    OfLogits(&'a [f32]),
    /// As in [`RowResult::TopK`]. Of a row that asks for a draw from its K most likely tokens the host draws from these.
    TopK(&'a [(u32, f32)]),
    Token(u32),
    Failed(NoToken),
}

/// A token that was drawn from a row of logits; [`NoLogits`](NoToken::NoLogits) before the draw.
pub type Drawn = Result<u32, NoToken>;
/// Draws the token of a row, if the row asks for one. See [`StepOutput::answer_rows_on`].
pub type Draw<'d> = dyn Fn(usize, &mut Drawn, &mut HostSampler) + Sync + 'd;

/// The results of a step.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// `[n_tokens, hidden]` for each layer of [`StepInputs::taps`](crate::StepInputs::taps), in their order.
    pub taps: Vec<Vec<f32>>,
    /// The attention that cells received, if the step asked for it ([`StepInputs::mass`](crate::StepInputs::mass)).
    pub mass: AttentionMass,
    wanted: Vec<WantedRow>,
    /// `[wanted, vocab]`. Once the rows are answered, the first ones are those of [`logits`](Self::logits).
    all: Vec<f32>,
    vocab: usize,
    n_logits: usize,
    answers: Vec<Answer>,
    /// The tokens of [`Answer::TopK`].
    top: Vec<(u32, f32)>,
    /// `[wanted]`, while rows are answered.
    drawn: Vec<Drawn>,
    sampler: HostSampler,
}

/// A [`RowResult`] without its data.
#[derive(Clone, Debug)]
enum Answer {
    Logits,
    TopK(Range<usize>),
    Token(u32),
    Failed(NoToken),
}

impl StepOutput {
    /// An output with memory for this many rows of logits.
    pub fn with_capacity(rows: usize, vocab: usize) -> Self {
        StepOutput { all: Vec::with_capacity(rows * vocab), ..StepOutput::default() }
    }

    /// The logits of the rows that asked for them, in order of rows: `[rows, vocab]`.
    pub fn logits(&self) -> &[f32] {
        &self.all[..self.n_logits * self.vocab]
    }

    /// Like [`logits`](Self::logits), for samplers that modify them.
    pub fn logits_mut(&mut self) -> &mut [f32] {
        &mut self.all[..self.n_logits * self.vocab]
    }

    /// Moves the [`logits`](Self::logits) out. Then every answer is gone; the next step allocates memory for its own.
    pub fn take_logits(&mut self) -> Vec<f32> {
        let mut all = std::mem::take(&mut self.all);
        all.truncate(self.n_logits * self.vocab);
        self.n_logits = 0;
        self.answers.clear();
        all
    }

    /// What each wanted row asked for, in order of rows.
    pub fn rows(&mut self) -> impl Iterator<Item = RowResult<'_>> {
        let mut logits = self.all.chunks_exact_mut(self.vocab.max(1));
        let top = &self.top;
        self.answers.iter().map(move |answer| match answer {
            Answer::Logits => RowResult::Logits(logits.next().unwrap_or_default()),
            Answer::TopK(range) => RowResult::TopK(&top[range.clone()]),
            Answer::Token(token) => RowResult::Token(*token),
            Answer::Failed(why) => RowResult::Failed(*why),
        })
    }

    /// Sets the wanted rows and discards the answers. For devices.
    pub fn want(&mut self, rows: &[WantedRow]) {
        self.wanted.clear();
        self.wanted.extend_from_slice(rows);
        self.answers.clear();
        self.n_logits = 0;
    }

    /// The rows that were set by [`want`](Self::want).
    pub fn wanted(&self) -> &[WantedRow] {
        &self.wanted
    }

    /// A device on the host writes the logits of all wanted rows here, over what is there: `[wanted, vocab]`.
    pub fn all_logits(&mut self, vocab: usize) -> &mut [f32] {
        self.vocab = vocab;
        self.all.resize(self.wanted.len() * vocab, 0.0);
        &mut self.all
    }

    /// Computes the result of every wanted row from [`all_logits`](Self::all_logits), on the host.
    pub fn answer_rows(&mut self) {
        let mut sampler = std::mem::take(&mut self.sampler);
        self.draw(|drawn, draw| {
            drawn.iter_mut().enumerate().for_each(|(row, drawn)| draw(row, drawn, &mut sampler));
        });
        self.sampler = sampler;
        self.collect();
    }

    /// Like [`answer_rows`](Self::answer_rows), with draws on several threads: `spread` calls its function for every index and element
    /// of its slice, on any thread and in any order, with a sampler that no other thread uses. For devices on the host.
    pub fn answer_rows_on(&mut self, spread: impl FnOnce(&mut [Drawn], &Draw<'_>)) {
        self.draw(spread);
        self.collect();
    }

    /// Draws the tokens of the rows that ask for one.
    fn draw(&mut self, spread: impl FnOnce(&mut [Drawn], &Draw<'_>)) {
        let StepOutput { wanted, all, vocab, drawn, .. } = self;
        drawn.clear();
        drawn.resize(wanted.len(), Err(NoToken::NoLogits));
        let (wanted, all, vocab) = (&*wanted, &*all, *vocab);
        spread(drawn, &|row, drawn, sampler| {
            let logits = row * vocab..(row + 1) * vocab;
            match &wanted[row].output {
                RowOutput::Logits | RowOutput::TopK(_) => {}
                RowOutput::Argmax => *drawn = argmax(&all[logits]),
                RowOutput::Sample(params) => *drawn = sampler.sample(&all[logits], params),
            }
        });
    }

    /// Computes the other answers, and puts all into the order of the rows.
    fn collect(&mut self) {
        let StepOutput { wanted, all, vocab, n_logits, answers, top, sampler, drawn, .. } = self;
        answers.clear();
        top.clear();
        *n_logits = 0;
        for (i, (WantedRow { output, .. }, drawn)) in wanted.iter().zip(drawn).enumerate() {
            let here = i * *vocab..(i + 1) * *vocab;
            answers.push(match output {
                RowOutput::Logits => {
                    if *n_logits < i {
                        all.copy_within(here, *n_logits * *vocab);
                    }
                    *n_logits += 1;
                    Answer::Logits
                }
                RowOutput::TopK(k) => Answer::top_k(&all[here], *k, sampler, top),
                RowOutput::Argmax | RowOutput::Sample(_) => Answer::of(*drawn),
            });
        }
    }

    /// Takes the result of every wanted row from a device, in order of rows. Of rows that are
    /// [`OfLogits`](DeviceRow::OfLogits) the host computes the rest. For devices.
    pub fn answer_from<'a>(&mut self, vocab: usize, rows: impl Iterator<Item = DeviceRow<'a>>) {
        let StepOutput { wanted, all, n_logits, answers, top, sampler, .. } = self;
        self.vocab = vocab;
        answers.clear();
        top.clear();
        all.clear();
        *n_logits = 0;
        for (WantedRow { output, .. }, row) in wanted.iter().zip(rows) {
            answers.push(match (row, output) {
                (DeviceRow::OfLogits(logits), RowOutput::Logits) => {
                    all.extend_from_slice(logits);
                    *n_logits += 1;
                    Answer::Logits
                }
                (DeviceRow::OfLogits(logits), RowOutput::TopK(k)) => Answer::top_k(logits, *k, sampler, top),
                (DeviceRow::OfLogits(logits), RowOutput::Argmax) => Answer::of(argmax(logits)),
                (DeviceRow::OfLogits(logits), RowOutput::Sample(params)) => {
                    Answer::of(sampler.sample(logits, params))
                }
                (DeviceRow::TopK(found), RowOutput::Sample(params)) => {
                    Answer::of(sampler.sample_of(found, params))
                }
                (DeviceRow::TopK(found), _) => {
                    let first = top.len();
                    top.extend_from_slice(found);
                    Answer::TopK(first..top.len())
                }
                (DeviceRow::Token(token), _) => Answer::Token(token),
                (DeviceRow::Failed(why), _) => Answer::Failed(why),
            });
        }
    }
}

impl Answer {
    fn of(drawn: Drawn) -> Answer {
        drawn.map_or_else(Answer::Failed, Answer::Token)
    }

    fn top_k(logits: &[f32], k: u32, sampler: &mut HostSampler, top: &mut Vec<(u32, f32)>) -> Answer {
        let first = top.len();
        let found = sampler.top_k(logits, k, top);
        found.map_or_else(Answer::Failed, |()| Answer::TopK(first..top.len()))
    }
}
