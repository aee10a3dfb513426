//! Checks against queueing theory: one server, constant cost per token, no prefixes, preempted work kept. Compares
//! mean response times with theory for exponential and hyperexponential service, by discipline and utilisation.
//!
//! Service is a whole number of tokens (geometric, or a mixture of two geometrics), so the theory is evaluated for
//! exactly that distribution: first come first served by Pollaczek and Khinchine; shortest job first as priority
//! classes, one for each size (A. Cobham, Operations Research 2, 1954); shortest remaining time by L. E. Schrage and
//! L. W. Miller, Operations Research 14, 1966, with sums for integrals, which is right to one token. M/M/1 is
//! shown beside the first.
//!
//! The means of independent runs are corrected by what chance did to their arrivals and services (control variates,
//! regressed over the runs), which says the same with fewer jobs. Intervals are 95%.
use kvist_cache::kinds::{GroupSpec, Visibility};
use kvist_cache::{Cache, PagedSpec};
use kvist_scheduler::{Config, LengthSource, Preempted, TokenWork};
use kvist_simulator::cost::ConstantRates;
use kvist_simulator::report::RequestRow;
use kvist_simulator::request::Request;
use kvist_simulator::run::{Options, run};
use kvist_testing::SplitMix64;

fn exponential(random: &mut SplitMix64, mean: f64) -> f64 {
    -mean * (1.0 - random.unit()).ln()
}

const TOKEN_NS: f64 = 1000.0;

/// With probability `p` geometric of mean about `mean`, else of mean about `other`; in tokens.
#[derive(Clone, Copy)]
struct Service {
    name: &'static str,
    p: f64,
    mean: f64,
    other: f64,
}

const EXPONENTIAL: Service = Service { name: "exponential", p: 1.0, mean: 200.0, other: 1.0 };
/// Squared coefficient of variation about 3.
const HYPEREXPONENTIAL: Service = Service { name: "hyperexponential", p: 0.8, mean: 84.0, other: 664.0 };

impl Service {
    fn draw(&self, random: &mut SplitMix64) -> u32 {
        let mean = if random.unit() < self.p { self.mean } else { self.other };
        exponential(random, mean).ceil().clamp(1.0, 1e9) as u32
    }
    /// P(S > k)
    fn tail(&self, k: u32) -> f64 {
        let k = f64::from(k);
        self.p * (-k / self.mean).exp() + (1.0 - self.p) * (-k / self.other).exp()
    }
    /// E[S] and E[S²].
    fn moments(&self) -> (f64, f64) {
        let geometric = |mean: f64| {
            let q = (-1.0 / mean).exp();
            (1.0 / (1.0 - q), (1.0 + q) / ((1.0 - q) * (1.0 - q)))
        };
        let (a, b) = (geometric(self.mean), geometric(self.other));
        (self.p * a.0 + (1.0 - self.p) * b.0, self.p * a.1 + (1.0 - self.p) * b.1)
    }

    /// Mean response time in units of the time per token.
    fn theory(&self, policy: &str, utilisation: f64) -> f64 {
        let (mean, second) = self.moments();
        let arrivals = utilisation / mean;
        if policy == "fcfs" {
            return mean + arrivals * second / (2.0 * (1.0 - utilisation));
        }
        let (mut response, mut below, mut square_below, mut residence) = (0.0, 0.0, 0.0, 0.0);
        let mut k = 0;
        while self.tail(k) > 1e-13 {
            // Sizes up to k − 1 load the server with `below`. Adds one token's residence at remaining size k − 1.
            residence += 1.0 / (1.0 - below);
            k += 1;
            let probability = self.tail(k - 1) - self.tail(k);
            let size = f64::from(k);
            let upto = below + arrivals * size * probability;
            square_below += arrivals * size * size * probability;
            response += probability
                * match policy {
                    "sjf" => size + arrivals * second / 2.0 / ((1.0 - below) * (1.0 - upto)),
                    "srpt" => {
                        let cut = square_below + arrivals * size * size * self.tail(k);
                        cut / 2.0 / ((1.0 - below) * (1.0 - upto)) + residence
                    }
                    other => panic!("no theory of {other}"),
                };
            below = upto;
        }
        response
    }
}

/// One sample path of arrivals and services, its sample means, and the response times in first-come-first-served
/// order.
struct Path {
    requests: Vec<Request>,
    /// Mean service, mean squared service, mean interval.
    means: [f64; 3],
    /// Response of each job by D. V. Lindley's recursion (Proc. Cambridge Phil. Soc. 48, 1952), in nanoseconds.
    fcfs_ns: Vec<u64>,
}

impl Path {
    /// Without `requests` the path cannot be served, only analysed.
    fn new(service: &Service, utilisation: f64, jobs: usize, seed: u64, with_requests: bool) -> Path {
        let mut random = SplitMix64(seed);
        let interval = service.moments().0 / utilisation;
        let (mut at, mut means, mut free_ns) = (0.0, [0.0; 3], 0);
        let (mut requests, mut fcfs_ns) = (Vec::new(), Vec::with_capacity(jobs));
        for id in 0..jobs {
            let wait = exponential(&mut random, interval);
            let tokens = service.draw(&mut random);
            at += wait;
            let square = f64::from(tokens) * f64::from(tokens);
            for (mean, x) in means.iter_mut().zip([f64::from(tokens), square, wait]) {
                *mean += x / jobs as f64;
            }
            let at_ns = (at * TOKEN_NS) as u64;
            free_ns = at_ns.max(free_ns) + u64::from(tokens) * TOKEN_NS as u64;
            fcfs_ns.push(free_ns - at_ns);
            if with_requests {
                requests.push(Request::new(id as u64, at_ns, 1, tokens));
            }
        }
        Path { requests, means, fcfs_ns }
    }
}

/// Mean response after a warm-up, in units of the time per token.
fn mean(responses_ns: &[u64]) -> f64 {
    let warm = &responses_ns[responses_ns.len() / 10..];
    warm.iter().map(|&ns| ns as f64).sum::<f64>() / warm.len() as f64 / TOKEN_NS
}

/// Serves a path and returns the response times. Checks invariants that hold for every path.
fn serve(policy: &str, path: &Path) -> Vec<u64> {
    let requests = &path.requests;
    let group = GroupSpec { capacity_tokens: u32::MAX, visibility: Visibility::FULL, max_step_tokens: 1 };
    let spec = PagedSpec { block_tokens: 256, groups: vec![group], rollback_tokens: 0, prefix: None };
    let options = Options {
        scheduler: Config {
            policy: policy.into(),
            lengths: LengthSource::Oracle,
            max_batch: 1,
            max_batch_tokens: 1,
            preempted: Preempted::Kept,
            work: TokenWork { prefill_ns: 1, decode_ns: 1 },
            ..Config::default()
        },
        itl: false,
        ..Options::default()
    };
    let rate = 1e6 / TOKEN_NS;
    let cost = ConstantRates::new(rate, rate).unwrap();
    let done = run(requests, Cache::paged(&spec).unwrap(), &cost, &options, None, &mut |_| ()).unwrap();
    let rows = &done.record.requests;
    let response = |row: &RequestRow| row.finished_ns.expect("every request is served") - row.arrival_ns;
    let responses: Vec<u64> = rows.iter().map(response).collect();
    // Little's law over a busy period from empty to empty: the integral of the number of requests is the sum of
    // responses.
    let sum: u64 = responses.iter().sum();
    let timeline = &done.record.timeline;
    let integral = timeline.mean_requests() * (timeline.end_ns() - rows[0].arrival_ns) as f64;
    assert!((integral - sum as f64).abs() < 1e-9 * integral, "L = {integral}, λW = {sum}");
    // Work is conserved: the server was busy for every token exactly once.
    let tokens: u64 = requests.iter().map(|r| u64::from(r.output_tokens)).sum();
    assert_eq!(done.record.steps.busy_ns, tokens * TOKEN_NS as u64);
    assert_eq!(done.counters.lost_tokens, 0);
    if policy == "fcfs" {
        assert!(
            responses == path.fcfs_ns,
            "first come first served is Lindley's recursion, to the nanosecond"
        );
    }
    responses
}

/// Solves `a x = b`, both given in `a`, by Gauss-Jordan elimination.
fn solve(mut a: Vec<Vec<f64>>) -> Vec<f64> {
    let n = a.len();
    for i in 0..n {
        let pivot = (i..n).max_by(|&p, &q| a[p][i].abs().total_cmp(&a[q][i].abs())).unwrap_or(i);
        a.swap(i, pivot);
        let row = a[i].clone();
        for (k, other) in a.iter_mut().enumerate() {
            if k != i {
                let factor = other[i] / row[i];
                other.iter_mut().zip(&row).for_each(|(x, r)| *x -= factor * r);
            }
        }
    }
    (0..n).map(|i| a[i][n] / a[i][i]).collect()
}

/// Mean and half width of the 95% interval of `(y, controls)`, corrected by controls with known expectations: least
/// squares of y = c₀ + Σ cⱼ (xⱼ / E xⱼ − 1).
fn corrected(runs: &[(f64, Vec<f64>)], expected: &[f64]) -> (f64, f64) {
    let n = expected.len() + 1;
    let row = |x: &[f64]| {
        let deviations = x.iter().zip(expected).map(|(x, e)| x / e - 1.0);
        std::iter::once(1.0).chain(deviations).collect::<Vec<f64>>()
    };
    let mut normal = vec![vec![0.0; n + 1]; n];
    for (y, x) in runs {
        let row = row(x);
        for i in 0..n {
            (0..n).for_each(|j| normal[i][j] += row[i] * row[j]);
            normal[i][n] += row[i] * y;
        }
    }
    let c = solve(normal.clone());
    let fitted = |x: &[f64]| row(x).iter().zip(&c).map(|(x, c)| x * c).sum::<f64>();
    let squares: f64 = runs.iter().map(|(y, x)| (y - fitted(x)).powi(2)).sum();
    let variance = squares / (runs.len() - n) as f64;
    // Variance of the intercept: σ² (XᵀX)⁻¹₀₀.
    normal.iter_mut().enumerate().for_each(|(i, row)| row[n] = if i == 0 { 1.0 } else { 0.0 });
    let inverse = solve(normal)[0];
    (c[0], 2.05 * (variance * inverse).sqrt()) // Student's t for 27 and more degrees of freedom
}

fn check(policies: &[&str], utilisation: f64, runs: u64, jobs: usize, tolerance: f64) {
    let mut bad = Vec::new();
    for service in [EXPONENTIAL, HYPEREXPONENTIAL] {
        let (mean_service, second) = service.moments();
        let fcfs = service.theory("fcfs", utilisation);
        let mut runs_of = vec![Vec::new(); policies.len()];
        for seed in 1..=runs {
            let path = Path::new(&service, utilisation, jobs, seed, true);
            for (policy, runs) in policies.iter().zip(&mut runs_of) {
                // The first-come-first-served response of the same path is also known. It is the best control
                // available.
                let mut controls = path.means.to_vec();
                if *policy != "fcfs" {
                    controls.push(mean(&path.fcfs_ns));
                }
                runs.push((mean(&serve(policy, &path)), controls));
            }
        }
        for (policy, runs) in policies.iter().zip(&runs_of) {
            let expected = [mean_service, second, mean_service / utilisation, fcfs];
            let found = corrected(runs, &expected[..runs[0].1.len()]);
            let theory = service.theory(policy, utilisation);
            bad.extend(compare(policy, &service, utilisation, theory, found, tolerance));
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Prints a row. Returns it if it is off or too imprecise.
fn compare(
    policy: &str,
    service: &Service,
    utilisation: f64,
    theory: f64,
    (measured, half): (f64, f64),
    tolerance: f64,
) -> Option<String> {
    let off = measured / theory - 1.0;
    let line = format!(
        "{policy:9} {:16} at {utilisation}: theory {theory:7.1}, found {measured:7.1} ± {half:4.1} tokens' time, {:+.2}%",
        service.name,
        100.0 * off
    );
    println!("{line}");
    (off.abs() > tolerance || half / theory > tolerance).then_some(line)
}

#[test]
fn at_seven_tenths() {
    check(&["fcfs"], 0.7, 32, 35_000, 0.02);
    check(&["sjf", "srpt"], 0.7, 32, 8_000, 0.02);
}

#[test]
fn at_nine_tenths() {
    check(&["sjf", "srpt"], 0.9, 32, 25_000, 0.02);
}

/// In a long queue, first come first served needs too many jobs to converge. But it equals Lindley's recursion to the
/// nanosecond (checked here and on every path of the tests above), and the recursion is fast.
#[test]
fn first_come_first_served_at_nine_tenths() {
    let mut bad = Vec::new();
    for service in [EXPONENTIAL, HYPEREXPONENTIAL] {
        serve("fcfs", &Path::new(&service, 0.9, 50_000, 99, true));
        let (mean_service, second) = service.moments();
        let expected = [mean_service, second, mean_service / 0.9];
        let run = |seed| {
            let path = Path::new(&service, 0.9, 400_000, seed, false);
            (mean(&path.fcfs_ns), path.means.to_vec())
        };
        let runs: Vec<_> = (1..=32).map(run).collect();
        let theory = service.theory("fcfs", 0.9);
        bad.extend(compare("recursion", &service, 0.9, theory, corrected(&runs, &expected), 0.02));
    }
    // M/M/1 with continuous service differs only by the rounding to tokens.
    let mm1 = EXPONENTIAL.mean / (1.0 - 0.9);
    assert!((EXPONENTIAL.theory("fcfs", 0.9) / mm1 - 1.0).abs() < 0.003);
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Many times as many jobs, and a narrower bound.
#[test]
#[ignore = "takes minutes: cargo test --release -p kvist-simulator --test simulation -- --ignored --nocapture queueing::"]
fn with_many_jobs() {
    check(&["fcfs", "sjf", "srpt"], 0.7, 40, 200_000, 0.01);
    check(&["fcfs", "sjf", "srpt"], 0.9, 40, 300_000, 0.015);
}
