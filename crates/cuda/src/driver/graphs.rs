//! Steps that repeat, as graphs.
//!
//! A step of decoding has hundreds of launches, each of which costs the host microseconds. Most steps launch the same kernels in the same
//! order as the one before, with other numbers here and there. Such a step is one launch of a graph, in which only the nodes are changed
//! whose numbers differ from those of the graph's last step.
use super::recording::{Call, Loaded};
use crate::ffi::{Code, Context, Graph};
use kvist_gpu::Kernel;
use std::sync::Arc;

/// Graphs that a recorder keeps: of decoding with one token, with some, with drafts, and one more.
const MOST_GRAPHS: usize = 4;
/// One launch is as cheap without a graph.
const LEAST_LAUNCHES: usize = 2;

const MOST_REFUSALS: u32 = 2;

/// The graphs of a recorder.
#[derive(Debug, Default)]
pub struct Graphs {
    /// The one that was used last comes last.
    kept: Vec<Kept>,
    /// How often the driver has refused to build or to change one. After the first time launches do not overlap any more, and after the
    /// second there are no graphs.
    refusals: u32,
}

#[derive(Debug)]
struct Kept {
    graph: Graph,
    kernels: Vec<Arc<Loaded>>,
    /// What its nodes have now.
    calls: Vec<Call>,
}

/// The launches of a step.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    pub kernels: &'a [(Kernel, Arc<Loaded>)],
    pub calls: &'a [Call],
    /// The last step had the same kernels.
    pub repeats: bool,
}

/// A graph with the numbers of a step, to be launched.
#[derive(Debug)]
pub struct Ready<'a> {
    pub graph: &'a mut Graph,
    /// Nodes that were changed; `None` if the graph is new.
    pub changed: Option<u64>,
}

impl Kept {
    fn has(&self, kernels: &[(Kernel, Arc<Loaded>)]) -> bool {
        let mut both = self.kernels.iter().zip(kernels);
        self.kernels.len() == kernels.len() && both.all(|(own, (_, other))| Arc::ptr_eq(own, other))
    }

    /// Changes the nodes whose calls differ. On `Err` the graph is of no use any more.
    fn update(&mut self, calls: &[Call]) -> Result<u64, Code> {
        let mut n = 0;
        for (i, (own, call)) in self.calls.iter_mut().zip(calls).enumerate() {
            if own != call {
                self.graph.set(i, &call.launch(&self.kernels[i]))?;
                *own = *call;
                n += 1;
            }
        }
        Ok(n)
    }
}

impl Graphs {
    /// The graph of a step, if there is one or the step is worth one: building takes longer than launching the kernels one by one, so they
    /// must have come in the last step as well.
    ///
    /// # Errors
    /// The driver refuses. Nothing was launched.
    pub fn ready(
        &mut self,
        (context, overlap): (&Arc<Context>, bool),
        step: Step<'_>,
    ) -> Result<Option<Ready<'_>>, Code> {
        let Step { kernels, calls, repeats } = step;
        if self.refusals >= MOST_REFUSALS || calls.len() < LEAST_LAUNCHES {
            return Ok(None);
        }
        let found = self.kept.iter().position(|kept| kept.has(kernels));
        let made = match found.map(|at| self.kept.remove(at)) {
            Some(mut kept) => kept.update(calls).map(|n| (kept, Some(n))),
            None if !repeats => return Ok(None),
            None => {
                if self.kept.len() == MOST_GRAPHS {
                    self.kept.remove(0);
                }
                let launches = kernels.iter().zip(calls).map(|((_, kernel), call)| call.launch(kernel));
                context.graph(launches, overlap && self.refusals == 0).map(|graph| {
                    let kernels = kernels.iter().map(|(_, kernel)| kernel.clone()).collect();
                    (Kept { graph, kernels, calls: calls.to_vec() }, None)
                })
            }
        };
        let (kept, changed) = made.inspect_err(|_| {
            self.refusals += 1;
            self.kept.clear();
        })?;
        self.kept.push(kept);
        Ok(self.kept.last_mut().map(|kept| Ready { graph: &mut kept.graph, changed }))
    }
}
