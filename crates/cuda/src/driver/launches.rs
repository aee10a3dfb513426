//! How recorded launches reach the stream: as a graph or one by one, and with times if they are measured. And how many there were.
use super::CudaDriver;
use super::recording::{Call, Loaded, Other, Recording};
use crate::ffi::Event;
use kvist_device::DeviceError;
use kvist_gpu::{BufferCopy, Driver, lock};
use std::sync::atomic::Ordering;

/// What was given to the device since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Launches of a kernel alone.
    pub launches: u64,
    /// Launches of graphs.
    pub graphs: u64,
    /// Graphs that were built.
    pub graphs_built: u64,
    /// Nodes of graphs that got other numbers or buffers.
    pub nodes_changed: u64,
}

/// The time that a kernel took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelTime {
    pub kernel: &'static str,
    /// Of one launch.
    pub nanoseconds: f64,
}

/// Measures every launch, see [`CudaDriver::measure`]; or some of them together, see [`CudaDriver::measure_together`].
#[derive(Debug)]
pub(super) struct Meter {
    repeats: u32,
    together: &'static [&'static str],
    launches: Vec<(&'static str, Event, Event)>,
}

impl CudaDriver {
    /// How the kernels of all submissions were launched.
    pub fn counts(&self) -> Counts {
        let [launches, graphs, graphs_built, nodes_changed] =
            self.counted.each_ref().map(|count| count.load(Ordering::Relaxed));
        Counts { launches, graphs, graphs_built, nodes_changed }
    }

    fn count(&self, more: Counts) {
        let more = [more.launches, more.graphs, more.graphs_built, more.nodes_changed];
        for (count, more) in self.counted.iter().zip(more) {
            count.fetch_add(more, Ordering::Relaxed);
        }
    }

    /// From now on launches every kernel `repeats` times, one after the other, and notes the times before and after; 0 stops
    /// that. For measurements of kernels that may run twice: attention and stores may, sums in place may not. There are no graphs meanwhile.
    pub fn measure(&self, repeats: u32) {
        self.measure_together(&[], repeats);
    }

    /// The same for the launches of these kernels in a submission, in their order and as one graph, as a decode step launches them: the next
    /// kernel is on its way while the one before ends. The time is that of all of them, under the name of the first.
    pub fn measure_together(&self, kernels: &'static [&'static str], repeats: u32) {
        let meter = Meter { repeats, together: kernels, launches: Vec::new() };
        *lock(&self.meter) = (repeats > 0).then_some(meter);
    }

    /// The times since the last call, once everything has ended.
    ///
    /// # Errors
    /// The device has failed.
    pub fn measured(&self) -> Result<Vec<KernelTime>, DeviceError> {
        self.wait_all()?;
        let mut meter = lock(&self.meter);
        let Some(meter) = meter.as_mut() else { return Ok(Vec::new()) };
        let repeats = f64::from(meter.repeats);
        let time = |(kernel, start, end): (&'static str, Event, Event)| {
            let elapsed = self.kept("time of a kernel", end.since(&start))?;
            Ok(KernelTime { kernel, nanoseconds: f64::from(elapsed) * 1e6 / repeats })
        };
        meter.launches.drain(..).map(time).collect()
    }

    /// Gives what was recorded to the stream.
    pub(super) fn run(&self, recording: &mut Recording, marks: &mut Vec<Event>) -> Result<(), DeviceError> {
        let mut meter = lock(&self.meter);
        if meter.is_none() && self.run_as_graph(recording)? {
            return Ok(());
        }
        let (mut launches, mut n) = (recording.launches(), 0);
        for (before, other) in recording.others() {
            launches.by_ref().take(before - n).try_for_each(|launch| self.launch(launch, &mut meter))?;
            n = *before;
            match other {
                &Other::Copy { ref from, from_byte, ref to, to_byte, bytes } => {
                    self.copy_now(&BufferCopy { from, from_byte, to, to_byte, bytes })?;
                }
                Other::CopyAhead(copy) => self.run_ahead(copy, marks)?,
                Other::Mark => marks.push(self.kept("mark", self.stream.event(true))?),
            }
        }
        launches.try_for_each(|launch| self.launch(launch, &mut meter))?;
        if let Some(meter) = meter.as_mut().filter(|meter| !meter.together.is_empty()) {
            self.launch_together(recording, meter)?;
        }
        self.count(Counts { launches: recording.launches().len() as u64, ..Counts::default() });
        Ok(())
    }

    /// Launches a graph of what was recorded, if there is one. Otherwise nothing has been launched.
    fn run_as_graph(&self, recording: &mut Recording) -> Result<bool, DeviceError> {
        if !self.graphs || !recording.others().is_empty() {
            return Ok(false);
        }
        let (graphs, step) = recording.graphed();
        match graphs.ready((&self.context, self.overlap), step) {
            Ok(None) => Ok(false),
            Ok(Some(ready)) => {
                self.kept("launch of a graph", self.stream.launch_graph(ready.graph))?;
                let graphs_built = u64::from(ready.changed.is_none());
                let nodes_changed = ready.changed.unwrap_or(0);
                self.count(Counts { launches: 0, graphs: 1, graphs_built, nodes_changed });
                Ok(true)
            }
            // If the device has failed, plain launches tell.
            Err(code) => {
                let what = self.context.text(code);
                tracing::warn!(target: "kvist::cuda", "the driver refuses a graph of a step: {what}");
                Ok(false)
            }
        }
    }

    fn launch(&self, (kernel, call): (&Loaded, &Call), meter: &mut Option<Meter>) -> Result<(), DeviceError> {
        let launch = || {
            self.stream
                .launch(&call.launch(kernel))
                .map_err(|code| self.fail(format!("launch of {}: {}", kernel.name, self.context.text(code))))
        };
        let Some(meter) = meter.as_mut().filter(|meter| meter.together.is_empty()) else { return launch() };
        let event = || self.kept("mark", self.stream.event(true));
        let start = event()?;
        (0..meter.repeats).try_for_each(|_| launch())?;
        meter.launches.push((kernel.name, start, event()?));
        Ok(())
    }

    /// Launches what is measured together once more, and then notes its time.
    fn launch_together(&self, recording: &Recording, meter: &mut Meter) -> Result<(), DeviceError> {
        let measured = || recording.launches().filter(|(kernel, _)| meter.together.contains(&kernel.name));
        let repeated = (0..meter.repeats).flat_map(|_| measured());
        let launches: Vec<_> = repeated.map(|(kernel, call)| call.launch(kernel)).collect();
        let Some(name) = meter.together.first().filter(|_| !launches.is_empty()) else { return Ok(()) };
        let graph = self.context.graph(launches.into_iter(), self.overlap);
        let mut graph = self.kept("graph of what is measured", graph)?;
        self.kept("launch of a graph", self.stream.launch_graph(&mut graph))?;
        let event = || self.kept("mark", self.stream.event(true));
        let start = event()?;
        self.kept("launch of a graph", self.stream.launch_graph(&mut graph))?;
        meter.launches.push((name, start, event()?));
        // Until the graph is dropped.
        self.kept("measured kernels", self.stream.synchronise())
    }
}
