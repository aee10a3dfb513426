//! Steps that repeat are launched as graphs, with the bits of launches one by one, whatever changes from step to step.
use crate::common::{self, DETERMINISTIC, emulation};
use crate::decoding::{self, A, B, Model};
use kvist_cache::Span;
use kvist_cuda::{Counts, CudaDevice, CudaDriver, Installation, Options};
use kvist_device::{DeviceError, Session};
use kvist_gpu::{Args, BufferCopy, Driver, Kernel, Recorder, RowsOp};
use kvist_testing::SplitMix64;

type Buffer = <CudaDriver as Driver>::Buffer;
type Recording = <CudaDriver as Driver>::Recorder;

/// Rows and columns of every buffer.
const ROWS: u32 = 8;
const WIDTH: u32 = 48;
const BYTES: u64 = (ROWS * WIDTH * 4) as u64;

/// A driver, some buffers, and steps over them.
struct Machine {
    gpu: CudaDriver,
    recorder: Recording,
    buffers: Vec<Buffer>,
    weights: Buffer,
}

impl Machine {
    /// As many buffers, with different numbers.
    fn new(installation: &Installation, graphs: bool) -> Result<Self, DeviceError> {
        let gpu = CudaDriver::open(installation, common::index(), Options { graphs, ..DETERMINISTIC })?;
        let buffers = (0..6).map(|i| gpu.filled("test", &numbers(i))).collect::<Result<_, _>>()?;
        let weights = gpu.filled("test", &1f32.to_le_bytes().repeat(WIDTH as usize))?;
        Ok(Machine { gpu, recorder: Recording::default(), buffers, weights })
    }

    /// Records a step with a shape of its own for every `shape`: sums and copies of some rows, and norms of them, so that numbers stay
    /// small. `rows`, and which buffers are used, change no kernel.
    fn record(&mut self, shape: u32, rows: u32, first: usize) {
        let Machine { gpu, recorder, buffers, weights } = self;
        let at = |i: usize| &buffers[(first + i) % buffers.len()];
        let groups = [WIDTH.div_ceil(64), rows, 1];
        for i in 0..2 + shape as usize {
            let sum = Args::new(&[rows * WIDTH]);
            let threads = [(rows * WIDTH).div_ceil(64), 1, 1];
            gpu.record(recorder, &Kernel::Add, &[Some(at(i)), Some(at(i + 1))], sum, threads);
            if i % 2 == 0 {
                let copy = Args::new(&[WIDTH, WIDTH, 0, 0]);
                let buffers = [Some(at(i + 1)), Some(at(i + 3)), None];
                gpu.record(recorder, &Kernel::Rows(RowsOp::Copy), &buffers, copy, groups);
            }
            let norm = Args::new(&[WIDTH, rows]).f32(1e-5);
            let kernel = Kernel::Norm { in_place: true };
            gpu.record(recorder, &kernel, &[Some(weights), Some(at(i + 1)), None], norm, [rows, 1, 1]);
        }
    }

    fn submit(&mut self) -> Result<(), DeviceError> {
        let submission = self.gpu.submit(&mut self.recorder, &[]);
        self.gpu.wait(&submission)
    }

    fn bits(&self) -> Result<Vec<u8>, DeviceError> {
        let ranges: Vec<_> = self.buffers.iter().map(|buffer| (buffer, 0, BYTES)).collect();
        let mut found = Vec::new();
        self.gpu.read_back(&ranges, |bytes| found = bytes.to_vec())?;
        Ok(found)
    }

    /// What happened since the last call.
    fn counts(&self, before: &mut Counts) -> (u64, u64, u64, u64) {
        let (now, then) = (self.gpu.counts(), std::mem::replace(before, self.gpu.counts()));
        let graphs = (now.graphs - then.graphs, now.graphs_built - then.graphs_built);
        (now.launches - then.launches, graphs.0, graphs.1, now.nodes_changed - then.nodes_changed)
    }
}

fn numbers(seed: u64) -> Vec<u8> {
    let mut random = SplitMix64(seed);
    (0..ROWS * WIDTH).flat_map(|_| ((random.unit() * 2.0 - 1.0) as f32).to_le_bytes()).collect()
}

/// GPU N of this machine if there is `KVIST_CUDA=N`, or an emulation of its own.
fn own(settings: &[(&str, &str)]) -> Option<Installation> {
    match common::index() {
        Some(_) => Some(Installation::of_system()),
        None => emulation(settings),
    }
}

/// Two machines do the same: one with graphs, one without.
#[test]
fn graphs_give_the_bits_of_launches_one_by_one() {
    let (Some(one), Some(other)) = (own(&[]), own(&[])) else { return };
    let mut both = [Machine::new(&one, true).unwrap(), Machine::new(&other, false).unwrap()];
    let mut random = SplitMix64(5);
    let (mut shape, mut rows, mut first) = (0, 1, 0);
    for step in 0..150u64 {
        // Most steps repeat the shape of the one before, as decoding does.
        if random.below(6) == 0 {
            shape = random.below(6);
        }
        if random.below(3) == 0 {
            rows = 1 + random.below(ROWS);
        }
        if random.below(8) == 0 {
            first = random.index(6);
        }
        let event = random.below(20);
        for machine in &mut both {
            machine.gpu.write(&machine.buffers[0], 0, &numbers(step));
            match event {
                // A buffer that was replaced. The new one may have the address of the old.
                0 | 1 => {
                    machine.buffers.remove(step as usize % 6);
                    machine.buffers.push(machine.gpu.filled("test", &numbers(step + 1000)).unwrap());
                }
                // A step that was given up.
                2 => {
                    machine.record((shape + 1) % 6, rows, first);
                    machine.recorder.restart();
                }
                // What is not a launch: here, or in the middle.
                3 => machine.gpu.mark(&mut machine.recorder),
                _ => {}
            }
            machine.record(shape, rows, first);
            if event == 4 {
                let Machine { gpu, recorder, buffers, .. } = machine;
                let copy =
                    BufferCopy { from: &buffers[1], from_byte: 0, to: &buffers[4], to_byte: 0, bytes: 96 };
                gpu.copy(recorder, &copy);
                machine.record(shape, rows, first + 1);
            }
            machine.submit().unwrap();
        }
        let [with, without] = both.each_ref().map(|machine| machine.bits().unwrap());
        assert!(with == without, "step {step}: shape {shape}, {rows} rows, event {event}");
        let numbers = with.as_chunks::<4>().0.iter().map(|x| f32::from_le_bytes(*x));
        assert!(numbers.clone().all(f32::is_finite) && numbers.clone().any(|x| x.abs() > 0.1));
    }
    let [with, without] = both.each_ref().map(|machine| machine.gpu.counts());
    assert!(with.graphs > 75 && with.graphs_built >= 6 && with.nodes_changed > 100, "{with:?}");
    assert_eq!(Counts { launches: without.launches, ..Counts::default() }, without);
}

/// When graphs are built, and which nodes are changed.
#[test]
fn only_what_differs_is_changed() {
    let Some(installation) = own(&[]) else { return };
    let mut machine = Machine::new(&installation, true).unwrap();
    let mut step = |shape: u32, rows: u32, first: usize| {
        let mut before = machine.gpu.counts();
        machine.record(shape, rows, first);
        machine.submit().unwrap();
        machine.counts(&mut before)
    };
    let n = 5; // launches of the smallest shape
    // Launches, graphs, graphs that are new, changed nodes.
    assert_eq!(step(0, 2, 0), (n, 0, 0, 0), "it may never come again");
    assert_eq!(step(0, 2, 0), (0, 1, 1, 0), "it has come twice");
    assert_eq!(step(0, 2, 0), (0, 1, 0, 0), "nothing has changed");
    // A copy's number of rows is its number of groups alone; sums and norms have it in their words as well.
    assert_eq!(step(0, 3, 0), (0, 1, 0, n));
    assert_eq!(step(0, 3, 1), (0, 1, 0, n), "other buffers");
    assert_eq!(step(0, 3, 1), (0, 1, 0, 0));
    // Other kernels, and back.
    assert_eq!(step(1, 3, 1), (8, 0, 0, 0));
    assert_eq!(step(0, 3, 1), (0, 1, 0, 0), "the graph is still there");
    assert_eq!(step(1, 3, 1), (8, 0, 0, 0), "not twice in a row");
    assert_eq!(step(1, 3, 1), (0, 1, 1, 0));
    // Four are kept: the first is dropped for a fifth, unless it was used.
    for shape in [2, 3] {
        assert_eq!(step(shape, 3, 1).1, 0);
        assert_eq!(step(shape, 3, 1), (0, 1, 1, 0));
    }
    assert_eq!(step(0, 3, 1), (0, 1, 0, 0));
    assert_eq!(step(4, 3, 1).1, 0);
    assert_eq!(step(4, 3, 1), (0, 1, 1, 0));
    assert_eq!(step(0, 3, 1), (0, 1, 0, 0));
    assert_eq!(step(1, 3, 1), (8, 0, 0, 0), "it was the one that had waited longest");
    // Times are those of single launches.
    machine.gpu.measure(1);
    machine.record(0, 3, 1);
    machine.submit().unwrap();
    let times = machine.gpu.measured().unwrap();
    assert_eq!(times.len(), n as usize);
    // Or of some kernels together.
    let names: &'static [&'static str] = Box::leak(Box::new([times[0].kernel]));
    machine.gpu.measure_together(names, 3);
    let graphs = machine.gpu.counts().graphs_built;
    machine.record(0, 3, 1);
    machine.submit().unwrap();
    let together = machine.gpu.measured().unwrap();
    assert_eq!(together.iter().map(|time| time.kernel).collect::<Vec<_>>(), names);
    assert_eq!(machine.gpu.counts().graphs_built, graphs, "it is no graph of a step");
    machine.gpu.measure(0);
}

/// The memory that graphs have comes back with their recorder, and they keep no buffer alive.
#[test]
fn graphs_leave_nothing_behind() {
    if common::index().is_some() {
        return; // a real driver keeps memory for later
    }
    let Some(installation) = own(&[]) else { return };
    let mut machine = Machine::new(&installation, true).unwrap();
    let before = machine.gpu.memory().unwrap();
    for round in 0..20 {
        for step in 0..12u32 {
            machine.record(step / 2, 1 + step % 2, round);
            machine.submit().unwrap();
        }
        assert!(machine.gpu.memory().unwrap().0 < before.0, "the emulation counts them");
        // What the steps used goes at once, although the graphs are still there.
        let kept = machine.gpu.memory().unwrap().0;
        machine.buffers.remove(0);
        assert_eq!(machine.gpu.memory().unwrap().0, kept + BYTES);
        machine.buffers.push(machine.gpu.filled("test", &numbers(7)).unwrap());
        machine.recorder = Recording::default();
        assert_eq!(machine.gpu.memory().unwrap(), before);
    }
    assert_eq!(machine.gpu.counts().graphs_built, 20 * 6);
}

/// A driver that refuses graphs, or has none, launches one by one. What fails after a graph was launched is kept.
#[test]
fn failures_of_graphs() {
    if common::index().is_some() {
        return;
    }
    let steps = |machine: &mut Machine| -> Result<Vec<u8>, DeviceError> {
        for step in 0..8u32 {
            machine.record(1, 1 + step / 3, 0);
            machine.submit()?;
        }
        machine.bits()
    };
    let Some(plain) = own(&[]) else { return };
    let expected = steps(&mut Machine::new(&plain, false).unwrap()).unwrap();
    for (failure, graphs) in [
        ("cuGraphCreate:2", 0),
        ("cuGraphAddKernelNode_v2:1:4", 0),
        ("cuGraphInstantiateWithFlags:2", 0),
        // Then launches do not overlap.
        ("cuGraphAddDependencies_v2:1:3", 6),
        // The fourth step changes nodes. The fifth gets a graph whose launches do not overlap, until the seventh changes nodes again.
        ("cuGraphExecKernelNodeSetParams_v2:910:3", 4),
    ] {
        let refuses = own(&[("KVIST_EMULATION_FAIL", failure)]).unwrap();
        let mut machine = Machine::new(&refuses, true).unwrap();
        let free = machine.gpu.memory().unwrap();
        assert!(steps(&mut machine).unwrap() == expected, "{failure}");
        assert_eq!(machine.gpu.counts().graphs, graphs, "{failure}");
        let dropped = graphs == 6 || machine.gpu.memory().unwrap() == free;
        assert!(dropped, "{failure}: graphs that are refused are dropped");
    }
    // The kernels of step 1 are launched one by one.
    for (failure, what) in [
        ("cuGraphLaunch:700:2", "launch of a graph: CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("node:719:20", "launch of a graph: CUDA_ERROR_LAUNCH_FAILED"),
    ] {
        let fails = own(&[("KVIST_EMULATION_FAIL", failure)]).unwrap();
        let mut machine = Machine::new(&fails, true).unwrap();
        let error = steps(&mut machine).unwrap_err().to_string();
        assert!(error.contains(what), "{failure}: {error}");
        assert_eq!(machine.bits().unwrap_err().to_string(), error, "{failure}: the first error is kept");
    }
    // A driver without one of the functions.
    for (name, graphs) in [("cuGraphInstantiateWithFlags", 0), ("cuGraphAddDependencies_v2", 7)] {
        let old = own(&[]).unwrap();
        let file = old.cuda.clone().unwrap();
        let mut library = std::fs::read(&file).unwrap();
        let name = format!("{name}\0");
        let places: Vec<_> =
            (0..library.len()).filter(|at| library[*at..].starts_with(name.as_bytes())).collect();
        assert!(!places.is_empty());
        places.into_iter().for_each(|at| library[at] = b'x');
        std::fs::write(&file, library).unwrap();
        let mut machine = Machine::new(&old, true).unwrap();
        assert!(steps(&mut machine).unwrap() == expected);
        assert_eq!(machine.gpu.counts().graphs, graphs, "{name}");
    }
}

/// Decoding: pools that grow, tables that grow, one sequence and two, few tokens and many.
#[test]
fn decoding_over_graphs_has_the_same_bits() {
    for (kind, storage, deterministic) in
        [("paged", "q8", true), ("cells", "f16", true), ("paged", "q8", false)]
    {
        let (Some(one), Some(other)) = (own(&[]), own(&[])) else { return };
        let open = |installation: &Installation, graphs: bool| -> CudaDevice {
            let options = Options { graphs, deterministic, ..DETERMINISTIC };
            kvist_cuda::open(installation, common::index(), options).unwrap()
        };
        let devices = [open(&one, true), open(&other, false)];
        let storage = storage.parse().unwrap();
        let model = Model { k: storage, v: storage, n_layers: 1, ..Model::default() };
        let mut sessions: Vec<Session> =
            devices.iter().map(|device| model.session(device, kind, 1400)).collect();
        sessions.iter_mut().for_each(|session| decoding::new(session, &[A, B]));
        let mut at = [0, 0];
        let mut step = |new: [u32; 2]| {
            let spans = [Span::chain(A, at[0], new[0]), Span::chain(B, at[1], new[1])];
            let spans: Vec<_> =
                spans.into_iter().zip(new).filter(|(_, n)| *n > 0).map(|(span, _)| span).collect();
            let bits = sessions.iter_mut().map(|session| {
                let out = model.step(session, &spans, 3);
                out.iter().flatten().map(|x| x.to_bits()).collect::<Vec<u32>>()
            });
            let bits: Vec<_> = bits.collect();
            assert!(bits[0] == bits[1], "{kind}: {new:?} at {at:?}");
            assert!(bits[0].iter().all(|x| f32::from_bits(*x).is_finite()));
            (at[0], at[1]) = (at[0] + new[0], at[1] + new[1]);
        };
        (0..40).for_each(|_| step([1, 0]));
        (0..20).for_each(|_| step([1, 1]));
        (0..6).for_each(|i| step([1 + i % 4, 7]));
        // Behind 1,024 positions there are two splits, and a kernel that merges them.
        (0..6).for_each(|_| step([170, 0]));
        (0..20).for_each(|_| step([1, 1]));
        (0..20).for_each(|_| step([0, 1]));
        let [with, without] = devices.each_ref().map(|device| device.driver().counts());
        assert!(with.graphs > 60 && with.nodes_changed > 0, "{with:?}");
        assert_eq!(without.graphs, 0);
    }
}
