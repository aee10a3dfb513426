//! A cache of one layer group, and helpers that run steps on it.
use kvist_cache::kinds::{self, GroupSpec, Visibility};
use kvist_cache::*;

pub const A: SeqId = SeqId(0);
pub const B: SeqId = SeqId(1);
pub const C: SeqId = SeqId(2);

pub struct Stepping {
    pub cache: Cache,
    pub plan: StepPlan,
}

pub fn full(kind: &str, capacity_tokens: u32) -> Stepping {
    with(kind, GroupSpec { capacity_tokens, visibility: Visibility::FULL, max_step_tokens: capacity_tokens })
}

pub fn with(kind: &str, group: GroupSpec) -> Stepping {
    let cache = Cache::new(vec![kinds::build(kind, &group).expect("it can be built")]);
    Stepping { cache, plan: StepPlan::default() }
}

impl Stepping {
    /// Appends and commits a chain to `seq`. Returns the fast path, if its reads had one.
    pub fn grow(&mut self, seq: SeqId, n_tokens: u32) -> Option<Window> {
        let start = self.cache.next_position(seq).expect("the sequence exists");
        self.step(&[Span::chain(seq, start, n_tokens)]).expect("there is room")
    }
    /// Appends and commits a draft tree to `seq`.
    pub fn speculate(&mut self, seq: SeqId, parents: &[Option<u32>]) -> Result<Option<Window>, Refused> {
        let parents: Vec<Option<NodeId>> = parents.iter().map(|p| p.map(NodeId)).collect();
        let start = self.cache.next_position(seq).unwrap_or(0);
        self.step(&[Span { seq, start, new: New::Tree(&parents) }])
    }
    /// Runs and commits any step.
    pub fn step(&mut self, spans: &[Span<'_>]) -> Result<Option<Window>, Refused> {
        let mut step = Step::begin(&mut self.cache, &StepRequest { spans }, &mut self.plan)?;
        let window = step.with_reads().group(GroupId(0)).reads.as_window();
        step.commit();
        Ok(window)
    }
    /// The reads of the last step.
    pub fn reads(&self) -> &Reads {
        &self.plan.group(GroupId(0)).reads
    }
    pub fn writes(&self) -> &[CellRun] {
        &self.plan.group(GroupId(0)).writes
    }
    pub fn report(&self) -> Report {
        self.cache.report().remove(0)
    }
    pub fn sequences(&mut self) -> Sequences<'_> {
        self.cache.sequences().expect("a kind of many sequences")
    }
    /// For each batch token, the cells it saw in the last step, ascending.
    pub fn seen(&self) -> Vec<Vec<u32>> {
        let (n_queries, cells) = (self.plan.n_tokens(), self.plan.group(GroupId(0)).cells_end);
        let mut explicit = Vec::new();
        self.reads().explicit(n_queries, cells, &mut explicit);
        let row = |row: &[bool]| (0..cells).filter(|&cell| row[cell as usize]).collect();
        explicit.chunks(cells as usize).map(row).collect()
    }
    /// Compacts until nothing is left to move. Returns the copies of each round.
    pub fn compact(&mut self) -> Vec<Vec<CellCopy>> {
        let (mut rounds, mut moves) = (Vec::new(), MovePlan::default());
        while let Some(round) = Relocation::begin(&mut self.cache, &mut moves) {
            rounds.push(round.moves().groups()[0].1.clone());
            round.commit();
        }
        rounds
    }
}
