//! What was recorded and not submitted yet.
use super::Buf;
use super::ahead::Ahead;
use super::graphs::{Graphs, Step};
use crate::ffi::{Function, Launch, MAX_BUFFERS};
use kvist_gpu::{Args, IMMEDIATE_WORDS, Kernel, Recorder};
use std::sync::Arc;

/// A kernel that can be launched.
#[derive(Debug)]
pub struct Loaded {
    pub function: Function,
    pub name: &'static str,
    pub threads: u32,
    pub shared_bytes: u32,
}

/// What a launch passes to its kernel. Plain numbers, so that steps are compared fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    addresses: [u64; MAX_BUFFERS],
    n_buffers: usize,
    words: [u32; IMMEDIATE_WORDS],
    groups: [u32; 3],
}

/// What is not a launch.
#[derive(Debug)]
pub enum Other {
    Copy {
        from: Buf,
        from_byte: u64,
        to: Buf,
        to_byte: u64,
        bytes: u64,
    },
    /// On the stream of copies; the other one waits for it here.
    CopyAhead(Ahead),
    Mark,
}

/// Operations that were recorded and not submitted yet: launches, and others in between.
#[derive(Debug, Default)]
pub struct Recording {
    /// The kernels of the calls. Those of the last submission stay until others take their places: mostly the next one has the same
    /// kernels in the same places, and then none has to be looked up.
    kernels: Vec<(Kernel, Arc<Loaded>)>,
    calls: Vec<Call>,
    /// What calls name by address: alive until they have been launched.
    buffers: Vec<Buf>,
    /// Each with the number of calls before it.
    others: Vec<(usize, Other)>,
    /// Whether every call since the last submission had the kernel that was in its place.
    repeats: bool,
    /// They know addresses alone, so no buffer outlives a submission: if the next step has other buffers, the nodes get their addresses.
    graphs: Graphs,
}

impl Recorder for Recording {
    fn restart(&mut self) {
        self.calls.clear();
        self.others.clear();
        self.buffers.clear();
    }
}

impl Call {
    /// What a kernel does not use is null. `None` if there are more buffers than any kernel has.
    pub fn new(buffers: &[Option<&Buf>], args: &Args, groups: [u32; 3]) -> Option<Self> {
        let mut addresses = [0; MAX_BUFFERS];
        for (address, buffer) in addresses.get_mut(..buffers.len())?.iter_mut().zip(buffers) {
            *address = buffer.map_or(0, Buf::address);
        }
        Some(Call { addresses, n_buffers: buffers.len(), words: *args.words(), groups })
    }

    pub fn launch<'a>(&'a self, kernel: &'a Loaded) -> Launch<'a> {
        Launch {
            function: &kernel.function,
            groups: self.groups,
            threads: kernel.threads,
            shared_bytes: kernel.shared_bytes,
            addresses: &self.addresses[..self.n_buffers],
            words: &self.words,
        }
    }
}

impl Recording {
    /// Records a launch. `load` finds the kernel; without one nothing is recorded.
    pub fn call(
        &mut self,
        kernel: &Kernel,
        load: impl FnOnce() -> Option<Arc<Loaded>>,
        buffers: &[Option<&Buf>],
        call: Call,
    ) {
        let place = self.calls.len();
        if self.kernels.get(place).is_none_or(|(known, _)| known != kernel) {
            self.repeats = false;
            let Some(loaded) = load() else { return };
            let found = (kernel.clone(), loaded);
            match self.kernels.get_mut(place) {
                Some(other) => *other = found,
                None => self.kernels.push(found),
            }
        }
        self.calls.push(call);
        self.buffers.extend(buffers.iter().flatten().copied().cloned());
    }

    /// Records something else.
    pub fn other(&mut self, other: Other) {
        self.others.push((self.calls.len(), other));
    }

    /// The launches, in order.
    pub fn launches(&self) -> impl ExactSizeIterator<Item = (&Loaded, &Call)> {
        self.kernels.iter().map(|(_, kernel)| &**kernel).zip(&self.calls)
    }

    /// What is not a launch, each with the number of launches before it.
    pub fn others(&self) -> &[(usize, Other)] {
        &self.others
    }

    /// The graphs of this recorder, and the launches as these see them.
    pub fn graphed(&mut self) -> (&mut Graphs, Step<'_>) {
        let (kernels, calls) = (&self.kernels[..self.calls.len()], &self.calls[..]);
        let repeats = self.repeats && self.kernels.len() == calls.len();
        (&mut self.graphs, Step { kernels, calls, repeats })
    }

    /// After a submission: lets go of everything but the kernels and the graphs.
    pub fn submitted(&mut self) {
        // Submissions of copies alone may come between two steps.
        if !self.calls.is_empty() {
            self.kernels.truncate(self.calls.len());
            self.repeats = true;
        }
        // A buffer that nothing else refers to is freed here, once the device is idle.
        self.restart();
    }
}
