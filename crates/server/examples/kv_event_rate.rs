//! What publishing KV events at a high rate costs decoding.
//!
//! ```text
//! cargo run --release -p kvist-server --example kv_event_rate -- [--rate 100000] [--seconds 2] [--rounds 20] [--threads 1]
//! ```
//!
//! A model stores a block per 16 tokens, so no model that this machine runs makes 10^5 events per second. Here the thread that
//! decodes (the embedded model, one sequence) also stores prompts in a full prefix index of its own after each token, as many
//! as `--rate` events per second need: a block is stored and another one evicted for it. The events then take the server's path: the log of the
//! index, the feed on the decoding thread, the task that translates and encodes, the PUB socket, and a subscriber in a process
//! of its own that reads and decodes every message.
//!
//! Variants take turns in every round, each time from another one on, and all of them store the same blocks: `off` (no log), `on` (published, no
//! subscriber), `read` (a subscriber that reads), `stuck` (that one, and one that subscribes and never reads). A ratio is that of
//! tokens per second to `off` in the same round.
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, Content, Moment, PagedSpec, PrefixSpec, SeqId, Span, Step, StepPlan, StepRequest};
use kvist_cpu::arch::Isa;
use kvist_device::MemoryBudget;
use kvist_engine::devices::{self, Compute, Cpu};
use kvist_engine::memory::CacheConfig;
use kvist_engine::session::{LogitRows, ModelSession, SequenceInput};
use kvist_model::{LoadOptions, Model, ModelFile, top_two};
use kvist_server::config::KvEventsSection;
use kvist_server::{KvEventFeed, KvEventSockets, KvEvents};
use serde::Deserialize;
use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zeromq::{Socket, SocketRecv, SubSocket};

type Failed = Box<dyn Error>;

const BLOCK: u32 = 16;
/// Blocks of the index that the events are about.
const CAPACITY_BLOCKS: u32 = 4096;
/// Blocks of a prompt, at most.
const PROMPT_BLOCKS: u64 = 64;
/// The sequence that decodes is cut back to its prompt at this length.
const CONTEXT: u32 = 256;
/// Before the measured time: the subscriber connects, and the index's first content is published.
const WARM_UP: Duration = Duration::from_millis(500);
/// After it: the subscriber reads what is left.
const CATCH_UP: Duration = Duration::from_millis(500);
/// User and system time in `/proc` are in these.
const TICKS_PER_S: f64 = 100.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    Off,
    On,
    Read,
    Stuck,
}

const VARIANTS: [(Variant, &str); 4] = [
    (Variant::Off, "off"),
    (Variant::On, "on, no subscriber"),
    (Variant::Read, "on, a subscriber that reads"),
    (Variant::Stuck, "on, one that reads and one that does not"),
];

struct Args {
    rate: u64,
    seconds: u64,
    rounds: usize,
    threads: usize,
}

/// What a run of a variant says.
struct Measured {
    tokens_per_s: f64,
    /// Per second in which the decoding thread had a core. Other work on the machine takes cores away, which this number does not
    /// show, and neither does it show that the publisher does: see `tokens_per_s`.
    tokens_per_cpu_s: f64,
    events_per_s: f64,
    /// Of the decoding thread, per event, in the median step: to store and evict the blocks, to log that, and to pass it on.
    ns_per_event: f64,
    /// Of this process, without the subscriber.
    cpu_per_s: f64,
    received: Option<Received>,
}

/// What the subscriber has read.
#[derive(Clone, Copy, Default)]
struct Received {
    blocks: u64,
    lost_messages: u64,
}

fn main() -> Result<(), Failed> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, address] = &args[..]
        && flag == "--subscribe"
    {
        return subscribe(address.parse()?);
    }
    let args = parse(&args)?;
    let mut decoding = Decoding::new(args.threads)?;
    let mut all: Vec<Vec<Measured>> = Vec::new();
    println!("load average before: {}", load_average());
    for first in 0..args.rounds {
        let mut round: Vec<(usize, Measured)> = Vec::new();
        for i in (0..VARIANTS.len()).map(|i| (first + i) % VARIANTS.len()) {
            round.push((i, measure(&mut decoding, VARIANTS[i].0, &args)?));
        }
        round.sort_by_key(|(i, _)| *i);
        all.push(round.into_iter().map(|(_, measured)| measured).collect());
    }
    println!("load average after: {}\n", load_average());
    println!(
        "| | tokens/s | ratio | tokens per CPU s of the decoding thread | ratio | events/s | its ns per event | CPU s per s | blocks read |"
    );
    println!("|---|--:|--:|--:|--:|--:|--:|--:|--:|");
    for (i, (_, name)) in VARIANTS.iter().enumerate() {
        let of = |value: fn(&Measured) -> f64| median(all.iter().map(|round| value(&round[i])).collect());
        // Median, least and most of the pairs.
        let ratio = |value: fn(&Measured) -> f64| {
            let mut ratios: Vec<f64> = all.iter().map(|round| value(&round[i]) / value(&round[0])).collect();
            ratios.sort_by(f64::total_cmp);
            format!("{:.3} ({:.3} to {:.3})", median(ratios.clone()), ratios[0], ratios[ratios.len() - 1])
        };
        let received = all.iter().filter_map(|round| round[i].received);
        let (blocks, lost) = received.fold((0, 0), |(n, lost), it| (n + it.blocks, lost + it.lost_messages));
        println!(
            "| {name} | {:.0} | {} | {:.0} | {} | {:.0} | {:.0} | {:.2} | {blocks}, {lost} messages lost |",
            of(|it| it.tokens_per_s),
            ratio(|it| it.tokens_per_s),
            of(|it| it.tokens_per_cpu_s),
            ratio(|it| it.tokens_per_cpu_s),
            of(|it| it.events_per_s),
            of(|it| it.ns_per_event),
            of(|it| it.cpu_per_s),
        );
    }
    Ok(())
}

fn parse(args: &[String]) -> Result<Args, Failed> {
    let mut parsed = Args { rate: 100_000, seconds: 2, rounds: 20, threads: 1 };
    for pair in args.chunks(2) {
        let [flag, value] = pair else { return Err(format!("{} needs a number", pair[0]).into()) };
        let number: u64 = value.parse().map_err(|_| format!("{flag} {value}: give a whole number"))?;
        if number == 0 {
            return Err(format!("{flag} 0: give 1 at least").into());
        }
        match flag.as_str() {
            "--rate" => parsed.rate = number,
            "--seconds" => parsed.seconds = number,
            "--rounds" => parsed.rounds = usize::try_from(number)?,
            "--threads" => parsed.threads = usize::try_from(number)?,
            _ => {
                return Err(
                    format!("{flag} is unknown: give --rate, --seconds, --rounds or --threads").into()
                );
            }
        }
    }
    Ok(parsed)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.is_empty() {
        return 0.0;
    }
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// CPU seconds of this process so far; 0 where there is no `/proc`.
fn cpu_s() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // After the name in parentheses: utime and stime are the 12th and 13th fields.
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2);
    fields.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / TICKS_PER_S
}

/// CPU nanoseconds of this thread so far; 0 where there is no `/proc`.
fn thread_cpu_ns() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0.0)
}

/// A sequence of the embedded model.
struct Decoding {
    session: ModelSession,
    prompt: Vec<u32>,
    last: u32,
    len: u32,
}

impl Decoding {
    fn new(threads: usize) -> Result<Decoding, Failed> {
        let compute = Compute::new(Isa::best(), threads);
        let (options, budget) = (LoadOptions::default(), MemoryBudget::unlimited());
        let device = Cpu::new(compute.clone());
        let model = Model::load(&ModelFile::Embedded, device, &options, &budget, &mut |_, _| {})?;
        let model = Arc::new(model);
        let tokenizer = model.tokenizer().ok_or("the embedded model has no tokenizer")?;
        let prompt = tokenizer.encode("The borrow checker", true)?;
        let session = ModelSession::new(&model, &devices::on(&compute), &CacheConfig::new(CONTEXT))?;
        Ok(Decoding { session, prompt, last: 0, len: CONTEXT })
    }

    /// Computes the next token.
    fn step(&mut self) -> Result<(), Failed> {
        let last = [self.last];
        let tokens = if self.len >= CONTEXT {
            self.session.truncate(SeqId(0), 0)?;
            self.len = 0;
            &self.prompt[..]
        } else {
            &last
        };
        self.session.forward(&[SequenceInput::chain(SeqId(0), tokens)], LogitRows::LastOfEach)?;
        self.len += tokens.len() as u32;
        self.last = top_two(self.session.logits()).ok_or("the logits are no numbers")?.0;
        Ok(())
    }
}

/// A prefix index that prompts go through.
struct Index {
    cache: Cache,
    plan: StepPlan,
    next_seq: u32,
    next_token: u32,
}

impl Index {
    fn new() -> Result<Index, Failed> {
        let capacity_tokens = CAPACITY_BLOCKS * BLOCK;
        let group =
            GroupSpec { capacity_tokens, visibility: Visibility::FULL, max_step_tokens: capacity_tokens };
        let prefix = Some(PrefixSpec::default());
        let spec = PagedSpec { block_tokens: BLOCK, groups: vec![group], rollback_tokens: 0, prefix };
        let mut index =
            Index { cache: Cache::paged(&spec)?, plan: StepPlan::default(), next_seq: 0, next_token: 0 };
        for _ in 0..u64::from(CAPACITY_BLOCKS) / PROMPT_BLOCKS {
            index.store(PROMPT_BLOCKS as u32)?;
        }
        Ok(index)
    }

    /// Stores a new prompt of so many blocks, for which as many are evicted.
    fn store(&mut self, n_blocks: u32) -> Result<(), Failed> {
        let (n_tokens, seq, at) = (n_blocks * BLOCK, SeqId(self.next_seq), Moment::default());
        self.next_seq = self.next_seq.wrapping_add(1);
        let prompt: Vec<u32> = (0..n_tokens).map(|i| self.next_token.wrapping_add(i) % 150_000).collect();
        // A prime, so that prompts begin anew only after all tokens.
        self.next_token = self.next_token.wrapping_add(7_919);
        let content = Content::Tokens(&prompt);
        let mut prefixes = self.cache.prefixes().ok_or("the cache has no prefix index")?;
        prefixes.open(seq, "", &content, at)?;
        prefixes.evict_until_free(n_tokens, at);
        let spans = [Span::chain(seq, 0, n_tokens)];
        Step::begin(&mut self.cache, &StepRequest { spans: &spans }, &mut self.plan)?.commit();
        self.cache.prefixes().ok_or("the cache has no prefix index")?.store(seq, &content, at)?;
        self.cache.sequences().ok_or("the cache has no sequences")?.seq_rm(seq, 0, u32::MAX)?;
        Ok(())
    }
}

fn measure(decoding: &mut Decoding, variant: Variant, args: &Args) -> Result<Measured, Failed> {
    let mut index = Index::new()?;
    // Each run has sockets and tasks of its own.
    let runtime = kvist_server::runtime()?;
    let entered = runtime.enter();
    let (mut feed, mut subscriber, mut stuck) = (None, None, None);
    if variant != Variant::Off {
        let endpoint = "tcp://127.0.0.1:0".parse().map(Some)?;
        let sockets = KvEventSockets::bind(&KvEventsSection { endpoint, ..KvEventsSection::default() })?;
        let (events, of_cache) = KvEvents::of_cache(sockets.ok_or("no endpoint")?, &mut index.cache, "")?;
        if matches!(variant, Variant::Read | Variant::Stuck) {
            subscriber = Some(Subscriber::start(events.address())?);
        }
        if variant == Variant::Stuck {
            stuck = Some(never_reads(events.address())?);
        }
        feed = Some(of_cache);
    }
    run(decoding, &mut index, &mut feed, args.rate, WARM_UP)?;
    let cpu_before = cpu_s();
    let mut measured = run(decoding, &mut index, &mut feed, args.rate, Duration::from_secs(args.seconds))?;
    measured.cpu_per_s = (cpu_s() - cpu_before) / args.seconds as f64;
    if let Some(subscriber) = subscriber {
        std::thread::sleep(CATCH_UP);
        measured.received = Some(subscriber.stop()?);
    }
    drop((stuck, entered));
    runtime.shutdown_background();
    Ok(measured)
}

/// Decodes for so long, and stores prompts at this rate.
fn run(
    decoding: &mut Decoding,
    index: &mut Index,
    feed: &mut Option<KvEventFeed>,
    rate: u64,
    time: Duration,
) -> Result<Measured, Failed> {
    let (mut n_tokens, mut n_events, mut ns_per_event) = (0u64, 0u64, Vec::new());
    let (begin, cpu_before_ns) = (Instant::now(), thread_cpu_ns());
    while begin.elapsed() < time {
        decoding.step()?;
        n_tokens += 1;
        let owed = (begin.elapsed().as_secs_f64() * rate as f64) as u64;
        let (stored_from, n_before) = (Instant::now(), n_events);
        while owed.saturating_sub(n_events) >= 2 {
            let n_blocks = ((owed - n_events) / 2).min(PROMPT_BLOCKS);
            index.store(n_blocks as u32)?;
            n_events += 2 * n_blocks; // one stored and one evicted
        }
        if let Some(feed) = feed {
            feed.pass_on(&mut index.cache);
        }
        if n_events > n_before {
            ns_per_event.push(stored_from.elapsed().as_nanos() as f64 / (n_events - n_before) as f64);
        }
    }
    let elapsed_s = begin.elapsed().as_secs_f64();
    let cpu_s = (thread_cpu_ns() - cpu_before_ns) / 1e9;
    Ok(Measured {
        tokens_per_cpu_s: n_tokens as f64 / if cpu_s > 0.0 { cpu_s } else { elapsed_s },
        tokens_per_s: n_tokens as f64 / elapsed_s,
        events_per_s: n_events as f64 / elapsed_s,
        ns_per_event: median(ns_per_event),
        cpu_per_s: 0.0,
        received: None,
    })
}

/// Connects and subscribes to everything, in ZMTP 3.0, and reads nothing.
fn never_reads(address: SocketAddr) -> Result<TcpStream, Failed> {
    let mut stream = TcpStream::connect(address)?;
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    stream.write_all(&greeting)?;
    stream.write_all(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB")?;
    stream.write_all(&[0, 1, 1])?;
    Ok(stream)
}

/// The process that reads.
struct Subscriber {
    process: Child,
    lines: BufReader<ChildStdout>,
}

impl Subscriber {
    fn start(address: SocketAddr) -> Result<Subscriber, Failed> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--subscribe", &address.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let lines = BufReader::new(process.stdout.take().ok_or("the subscriber has no output")?);
        let mut subscriber = Subscriber { process, lines };
        subscriber.line()?; // it is connected
        Ok(subscriber)
    }

    fn line(&mut self) -> Result<String, Failed> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        if line.is_empty() { Err("the subscriber has ended".into()) } else { Ok(line) }
    }

    /// Lets it tell what it has read, and end.
    fn stop(mut self) -> Result<Received, Failed> {
        drop(self.process.stdin.take());
        let line = self.line()?;
        self.process.wait()?;
        let numbers: Vec<u64> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let [blocks, lost_messages] = numbers[..] else {
            return Err(format!("not two numbers: {line}").into());
        };
        Ok(Received { blocks, lost_messages })
    }
}

#[derive(Deserialize)]
struct BlockEvent {
    #[serde(default)]
    block_hashes: Vec<u64>,
}

/// Reads and decodes messages until its input ends. Prints a line when it is connected, and then the blocks of all events and how many
/// messages are missing between those that came.
fn subscribe(address: SocketAddr) -> Result<(), Failed> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut socket = SubSocket::new();
        socket.connect(&format!("tcp://{address}")).await?;
        socket.subscribe("").await?;
        println!("connected");
        let (stopped, mut stop) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            let _ = stopped.send(());
        });
        let (mut received, mut next) = (Received::default(), None);
        loop {
            let message = tokio::select! {
                message = socket.recv() => message?,
                _ = &mut stop => break,
            };
            let frames = message.into_vec();
            let [_, number, payload] = &frames[..] else { return Err("not three frames".into()) };
            let number = u64::from_be_bytes(number[..].try_into()?);
            received.lost_messages += next.map_or(0, |next| number - next);
            next = Some(number + 1);
            let (_, events, _): (f64, Vec<BlockEvent>, u32) = rmp_serde::from_slice(payload)?;
            received.blocks += events.iter().map(|event| event.block_hashes.len() as u64).sum::<u64>();
        }
        println!("{} {}", received.blocks, received.lost_messages);
        Ok(())
    })
}
