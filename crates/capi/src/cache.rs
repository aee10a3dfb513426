//! The cache without a model: its bookkeeping alone, for engines with kernels of their own, or with attention over the
//! caller's rows.
mod attend;
pub(crate) mod ffi;
mod step;

use crate::session::{no_trees, one_sequence, truncate};
use crate::status::{Failure, Outcome};
use kvist_engine::kvist_cache::*;
use kvist_engine::kvist_device::{AttendRows, Session};

/// Where a step's K and V go.
#[expect(clippy::large_enum_variant)] // a handle holds one, on the heap already
enum Bytes {
    /// To the caller's own memory. The cache checks the order of layers.
    Caller { cache: kvist_engine::kvist_cache::Cache, plan: StepPlan, order: LayerOrder },
    /// Into pools, and attention reads them.
    Pools(Session),
}

/// A cache and at most one step in flight.
pub(crate) struct Cache {
    bytes: Bytes,
    in_flight: bool,
    /// Per layer: the layer whose K and V it reads.
    owners: Vec<LayerId>,
    n_heads: usize,
    /// What the last call gave to C.
    given: Given,
}

/// Memory behind pointers that C holds until its next call.
#[derive(Default)]
struct Given {
    numbers: Vec<u32>,
    copies: Vec<ffi::kvist_copy>,
    mask: Vec<bool>,
    tables: BlockTables,
}

impl Cache {
    fn new(bytes: Bytes, owners: Vec<LayerId>, n_heads: usize) -> Self {
        Cache { bytes, in_flight: false, owners, n_heads, given: Given::default() }
    }

    /// The cache between steps.
    fn idle(&mut self) -> Outcome<&mut kvist_engine::kvist_cache::Cache> {
        if self.in_flight {
            return Err(Failure::order("a step is in flight: commit or drop it first"));
        }
        Ok(match &mut self.bytes {
            Bytes::Caller { cache, .. } => cache,
            Bytes::Pools(session) => &mut session.cache,
        })
    }

    fn begin(&mut self, request: &StepRequest<'_>) -> Outcome<()> {
        self.idle()?;
        match &mut self.bytes {
            Bytes::Caller { cache, plan, order } => {
                Step::begin(cache, request, plan)?.with_reads();
                order.begin();
            }
            // A step that is dropped can be continued.
            Bytes::Pools(session) => drop(session.step(request)?),
        }
        self.in_flight = true;
        Ok(())
    }

    fn can_run(&mut self, request: &StepRequest<'_>) -> Outcome<()> {
        self.idle()?;
        let can_run = match &mut self.bytes {
            Bytes::Caller { cache, plan, .. } => cache.can_run(request, plan),
            Bytes::Pools(session) => session.can_run(request),
        };
        Ok(can_run?)
    }

    /// Calls `run` with the plan of the step in flight, and with the memory for what it gives to C.
    fn plan<R>(&mut self, run: impl FnOnce(&StepPlan, &mut Given) -> Outcome<R>) -> Outcome<R> {
        if !self.in_flight {
            return Err(no_step());
        }
        match &mut self.bytes {
            Bytes::Caller { plan, .. } => run(plan, &mut self.given),
            Bytes::Pools(session) => run(session.resume().ok_or_else(no_step)?.plan(), &mut self.given),
        }
    }

    /// One layer group of the plan.
    fn group<R>(
        &mut self,
        group: u32,
        run: impl FnOnce(&StepPlan, &GroupPlan, &mut Given) -> Outcome<R>,
    ) -> Outcome<R> {
        self.plan(|plan, given| {
            let n = plan.n_groups();
            match u16::try_from(group) {
                Ok(g) if usize::from(g) < n => run(plan, plan.group(GroupId(g)), given),
                _ => Err(Failure::argument(format!("there is no layer group {group}: there are {n}"))),
            }
        })
    }

    /// Block tables of one layer group, for blocks of `block_tokens`. They are in `given`.
    fn tables(&mut self, group: u32, block_tokens: u32) -> Outcome<&BlockTables> {
        let Bytes::Caller { cache, plan, .. } = &mut self.bytes else {
            return Err(Failure::unsupported(
                "a cache with a backend has attention of its own: make one without for block tables",
            ));
        };
        if self.in_flight {
            Step::of_plan(cache, plan).ok_or_else(no_step)?.with_tables();
        }
        if block_tokens == 0 {
            return Err(Failure::argument("block_tokens is 0: a block holds at least one token"));
        }
        self.group(group, |_, group, given| {
            group.tables(block_tokens, &mut given.tables).map_err(|why| Failure::unsupported(why.to_string()))
        })?;
        Ok(&self.given.tables)
    }

    /// Records that a layer ran in the caller's kernels.
    fn layer_ran(&mut self, layer: LayerId) -> Outcome<()> {
        if !self.in_flight {
            return Err(no_step());
        }
        let Bytes::Caller { order, .. } = &mut self.bytes else {
            return Err(Failure::unsupported("this cache runs its layers itself: call kvist_step_attend"));
        };
        let owns = self.owners.get(usize::from(layer.0)) == Some(&layer);
        order.check(layer, owns)?;
        order.ran(layer);
        Ok(())
    }

    fn attend(&mut self, call: AttendRows<'_>) -> Outcome<()> {
        if !self.in_flight {
            return Err(no_step());
        }
        let Bytes::Pools(session) = &mut self.bytes else {
            return Err(Failure::unsupported("this cache has no backend, so it does bookkeeping alone"));
        };
        Ok(session.resume().ok_or_else(no_step)?.attend_rows(call)?)
    }

    /// The copies of K and V that a commit of `kept` needs first, group by group, in `moves`.
    fn kept_moves(&mut self, kept: &[Kept<'_>], moves: &mut MovePlan) -> Outcome<()> {
        if !self.in_flight {
            return Err(no_step());
        }
        let Bytes::Caller { cache, plan, .. } = &mut self.bytes else {
            return Err(Failure::unsupported("a cache with a backend moves K and V itself"));
        };
        Ok(Step::of_plan(cache, plan).ok_or_else(no_step)?.kept_moves(kept, moves)?)
    }

    /// Commits the step. Without `kept` every span keeps all it can: whole chains, and speculative nodes where these
    /// outlive their step.
    fn commit(&mut self, kept: Option<&[Kept<'_>]>) -> Outcome<()> {
        let n_spans = self.plan(|plan, _| Ok(plan.spans().len()))?;
        let all = vec![Kept::All; n_spans];
        let kept = kept.unwrap_or(&all);
        match &mut self.bytes {
            Bytes::Caller { cache, plan, order } => {
                order.complete()?;
                Step::of_plan(cache, plan).ok_or_else(no_step)?.commit_kept(kept)?;
            }
            Bytes::Pools(session) => session.resume().ok_or_else(no_step)?.commit_kept(kept)?,
        }
        self.in_flight = false;
        Ok(())
    }

    /// Compacts the cache; `copy` makes the copies of caches whose bytes are the caller's, and returns false to stop.
    fn compact(&mut self, mut copy: impl FnMut(GroupId, &[CellCopy]) -> bool) -> Outcome<()> {
        self.idle()?;
        match &mut self.bytes {
            Bytes::Pools(session) => Ok(session.compact()?),
            Bytes::Caller { cache, .. } => {
                let mut moves = MovePlan::default();
                while let Some(round) = Relocation::begin(cache, &mut moves) {
                    if !round.moves().groups().iter().all(|(group, copies)| copy(*group, copies)) {
                        return Err(Failure::new(
                            crate::status::kvist_status::KVIST_STOPPED,
                            "the copy callback stopped the compaction",
                        ));
                    }
                    round.commit();
                }
                Ok(())
            }
        }
    }

    fn sequences(&mut self) -> Outcome<Sequences<'_>> {
        self.idle()?.sequences().ok_or_else(one_sequence)
    }

    fn truncate(&mut self, seq: SeqId, n_tokens: u32) -> Outcome<()> {
        truncate(self.idle()?, seq, n_tokens)
    }

    fn accept(&mut self, seq: SeqId, path: &[NodeId]) -> Outcome<()> {
        Ok(self.idle()?.trees().ok_or_else(no_trees)?.commit_path(seq, path)?)
    }
}

fn no_step() -> Failure {
    Failure::order("no step is in flight: begin one first")
}
