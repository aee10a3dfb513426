//! What users and the scheduler measured, served and simulated.
use super::users::User;
use kvist_engine::serving::EngineStats;
use kvist_simulator::report::RequestRow;
use kvist_simulator::run::Run;
use kvist_simulator::statistics::Spread;
use serde::Serialize;

#[derive(Serialize)]
pub struct Figure {
    pub figure: &'static str,
    pub unit: &'static str,
    pub served: f64,
    pub simulated: f64,
    /// Simulated with the table's times multiplied by what the served steps took, over what the table says.
    pub at_speed: f64,
}

impl Figure {
    /// `simulated` or `at_speed` over served, less one; `None` if the served figure is 0.
    pub fn error(&self, predicted: f64) -> Option<f64> {
        (self.served != 0.0).then(|| predicted / self.served - 1.0)
    }
}

/// A figure's name, its unit and its value.
type Named = (&'static str, &'static str, f64);

/// Measurements of users and scheduler.
pub struct Figures {
    ttft_s: Option<Spread>,
    tpot_s: Option<Spread>,
    busy_s: f64,
    duration_s: f64,
    steps: f64,
    hit_tokens: f64,
    preemptions: f64,
    loaded_tokens: f64,
    /// Requests per second whose first token came in time.
    pub goodput: f64,
}

/// Requests per second of `duration_s` whose first token came within `slo_s`.
fn goodput(ttft_s: impl Iterator<Item = f64>, duration_s: f64, slo_s: f64) -> f64 {
    ttft_s.filter(|&ttft| ttft <= slo_s).count() as f64 / duration_s
}

/// Figures of a load that was served, and simulated with the table as it is and at the speed of the run.
pub fn compared(served: &Figures, simulated: &Figures, at_speed: &Figures) -> Vec<Figure> {
    let simulated = simulated.named().into_iter().zip(at_speed.named());
    let figure = |((figure, unit, served), (simulated, at_speed)): (Named, (Named, Named))| Figure {
        figure,
        unit,
        served,
        simulated: simulated.2,
        at_speed: at_speed.2,
    };
    served.named().into_iter().zip(simulated).map(figure).collect()
}

impl Figures {
    pub fn simulated(run: &Run, slo_s: f64) -> Figures {
        let record = &run.record;
        let spread = |of: fn(&RequestRow) -> Option<f64>| {
            Spread::of(&mut record.requests.iter().filter_map(of).collect::<Vec<_>>())
        };
        let last_ns = record.requests.iter().filter_map(|row| row.finished_ns).max().unwrap_or(0);
        Figures {
            ttft_s: spread(RequestRow::ttft_s),
            tpot_s: spread(RequestRow::tpot_s),
            busy_s: record.steps.busy_ns as f64 / 1e9,
            duration_s: last_ns as f64 / 1e9,
            steps: record.steps.steps as f64,
            hit_tokens: run.counters.hit_tokens as f64,
            preemptions: record.steps.preemptions as f64,
            loaded_tokens: record.tiers.as_ref().map_or(0.0, |tiers| tiers.loaded_tokens as f64),
            goodput: goodput(
                record.requests.iter().filter_map(RequestRow::ttft_s),
                last_ns as f64 / 1e9,
                slo_s,
            ),
        }
    }

    pub fn served(users: &[User], stats: &EngineStats, slo_s: f64) -> Figures {
        let spread =
            |of: fn(&User) -> Option<f64>| Spread::of(&mut users.iter().filter_map(of).collect::<Vec<_>>());
        let duration_s = users.iter().map(|user| user.last_s).fold(0.0, f64::max);
        let loaded = stats.tiers.as_ref().map_or(0, |tiers| tiers.counters.loaded_tokens.iter().sum::<u64>());
        Figures {
            ttft_s: spread(|user| Some(user.first_s - user.arrival_s)),
            tpot_s: spread(User::tpot_s),
            busy_s: stats.busy_ns as f64 / 1e9,
            duration_s,
            steps: stats.counters.steps as f64,
            hit_tokens: stats.counters.hit_tokens as f64,
            preemptions: stats.counters.preemptions as f64,
            loaded_tokens: loaded as f64,
            goodput: goodput(users.iter().map(|user| user.first_s - user.arrival_s), duration_s, slo_s),
        }
    }

    pub fn busy(&self) -> f64 {
        self.busy_s / self.duration_s
    }

    fn named(&self) -> Vec<Named> {
        let ms = |spread: &Option<Spread>, of: fn(&Spread) -> f64| spread.as_ref().map_or(0.0, of) * 1e3;
        vec![
            ("TTFT mean", "ms", ms(&self.ttft_s, |s| s.mean)),
            ("TPOT mean", "ms", ms(&self.tpot_s, |s| s.mean)),
            ("TTFT p50", "ms", ms(&self.ttft_s, |s| s.p50)),
            ("TTFT p90", "ms", ms(&self.ttft_s, |s| s.p90)),
            ("TPOT p50", "ms", ms(&self.tpot_s, |s| s.p50)),
            ("TPOT p90", "ms", ms(&self.tpot_s, |s| s.p90)),
            ("busy", "%", self.busy() * 100.0),
            ("steps", "", self.steps),
            ("tokens found", "", self.hit_tokens),
            ("tokens loaded", "", self.loaded_tokens),
            ("preemptions", "", self.preemptions),
            ("goodput", "requests/s", self.goodput),
        ]
    }
}
