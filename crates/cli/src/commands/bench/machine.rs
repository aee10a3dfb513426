//! The state of the machine during a measurement, and statistics over its runs.
use kvist_cpu::Compute;
use kvist_cpu::stream::Stream;
use kvist_simulator::statistics::percentile;
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// Part of every row.
#[derive(Serialize, Clone, Debug)]
pub struct Machine {
    pub cpu: String,
    pub cores: usize,
    pub threads: usize,
    /// The instruction set the kernels ran on.
    pub isa: String,
    /// The GPU that computed, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// Transparent huge pages: the system's setting.
    pub huge_pages: Option<String>,
    pub governor: Option<String>,
    /// Share of all CPU time that other guests took, during the run.
    pub steal: Option<f64>,
    /// Share of all CPU time that was busy, during the run.
    pub busy: Option<f64>,
}

/// For the head of a table.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.adapter {
            Some(adapter) => write!(f, "{adapter}, on {}", self.cpu),
            None => write!(f, "{}, {} threads, {}", self.cpu, self.threads, self.isa),
        }
    }
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_string())
}

/// `model name` of the first core.
pub fn cpu() -> String {
    let info = read("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|l| l.strip_prefix("model name")?.split_once(": "));
    model.map_or(std::env::consts::ARCH.to_string(), |(_, name)| name.to_string())
}

/// CPU time since the machine started, in ticks.
#[derive(Clone, Copy)]
struct Ticks {
    all: u64,
    idle: u64,
    steal: u64,
}

impl Ticks {
    fn now() -> Option<Self> {
        let stat = read("/proc/stat")?;
        let fields = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
        let fields: Vec<u64> = fields.filter_map(|field| field.parse().ok()).collect();
        // user nice system idle iowait irq softirq steal …
        let idle = fields.get(3)? + fields.get(4)?;
        Some(Ticks { all: fields.iter().take(8).sum(), idle, steal: *fields.get(7)? })
    }
}

/// Samples the machine's CPU time during a run.
pub struct Watch {
    started: Option<Ticks>,
}

impl Watch {
    pub fn start() -> Self {
        Watch { started: Ticks::now() }
    }

    /// The machine, and its load since the start.
    pub fn machine(&self, compute: &Compute) -> Machine {
        let since = self.started.zip(Ticks::now()).filter(|(a, b)| b.all > a.all);
        let part = |f: fn(&Ticks) -> u64| {
            since.map(|(a, b)| f(&b).saturating_sub(f(&a)) as f64 / (b.all - a.all) as f64)
        };
        Machine {
            cpu: cpu(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            threads: compute.threads.n(),
            isa: compute.isa.to_string(),
            adapter: None,
            huge_pages: read("/sys/kernel/mm/transparent_hugepage/enabled"),
            governor: read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            steal: part(|t| t.steal),
            busy: part(|t| t.idle).map(|idle| 1.0 - idle),
        }
    }
}

/// Milliseconds of several runs.
#[derive(Serialize, Clone, Copy, Debug, Default)]
pub struct Spread {
    pub median_ms: f64,
    pub min_ms: f64,
    pub max_ms: f64,
    pub runs: usize,
}

impl Spread {
    pub fn of(runs: &[Duration]) -> Self {
        let mut sorted: Vec<f64> = runs.iter().map(|run| run.as_secs_f64() * 1e3).collect();
        sorted.sort_by(f64::total_cmp);
        let at = |p: f64| percentile(&sorted, p).unwrap_or_default();
        Spread { median_ms: at(0.5), min_ms: at(0.0), max_ms: at(1.0), runs: runs.len() }
    }
}

/// The rate of reading alone, measured in alternation with the kernel.
pub struct ReadLimit {
    stream: Stream,
    runs: Vec<Duration>,
}

/// Smaller streams would stay in a cache, larger ones take longer without more information.
const MIN: u64 = 256 << 20;
const MAX: u64 = 1 << 30;

impl ReadLimit {
    pub fn new(compute: &Compute, bytes: u64) -> anyhow::Result<Self> {
        let bytes = bytes.clamp(MIN, MAX) as usize;
        let refused = |bytes| anyhow::anyhow!("the system refused {bytes} bytes for the read limit");
        Ok(ReadLimit { stream: Stream::new(compute, bytes).map_err(refused)?, runs: Vec::new() })
    }
    pub fn measure(&mut self, compute: &Compute) {
        self.runs.push(self.stream.read(compute));
    }
    /// Bytes per second.
    pub fn rate(&self) -> f64 {
        self.stream.bytes() as f64 / (Spread::of(&self.runs).median_ms / 1e3)
    }
    /// The least time, in milliseconds, to read `bytes` bytes.
    pub fn ms(&self, bytes: u64) -> f64 {
        bytes as f64 / self.rate() * 1e3
    }
}
