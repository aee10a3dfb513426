//! The users of a load: they submit their requests to an engine in real time, and note when tokens come.
use crate::{interrupt, progress};
use anyhow::{Context, ensure};
use kvist_cache::Prompt;
use kvist_engine::serving::{Engine, EngineState, Event, FinishReason, GenerationHandle, Job, Watcher};
use kvist_simulator::request::Request;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// When a user's request arrived, and when its tokens came; seconds since the start.
pub struct User {
    pub arrival_s: f64,
    pub first_s: f64,
    pub last_s: f64,
    n: u32,
}

impl User {
    /// `None` for fewer than two tokens.
    pub fn tpot_s(&self) -> Option<f64> {
        (self.n > 1).then(|| (self.last_s - self.first_s) / f64::from(self.n - 1))
    }

    /// Receives the events of one generation until it ends.
    async fn listen(
        mut generation: GenerationHandle,
        began: Instant,
        arrival_s: f64,
    ) -> anyhow::Result<User> {
        let mut user = User { arrival_s, first_s: 0.0, last_s: 0.0, n: 0 };
        loop {
            match generation.next().await {
                Some(Event::Admitted { .. }) => {}
                Some(Event::Token(_)) => {
                    user.last_s = began.elapsed().as_secs_f64();
                    if user.n == 0 {
                        user.first_s = user.last_s;
                    }
                    user.n += 1;
                }
                Some(Event::Done(done)) if done.finish == FinishReason::Length => return Ok(user),
                Some(other) => anyhow::bail!("a request ended early: {other:?}"),
                None => anyhow::bail!("the engine has stopped"),
            }
        }
    }
}

/// Submits all requests at their times, and waits for all of them to end.
pub fn serve(engine: &Engine, requests: &[Request], quiet: bool) -> anyhow::Result<Vec<User>> {
    // One thread: it only waits, and the cores belong to the engine.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start a thread for users")?;
    let bar = progress::bar("serving", requests.len() as u64, quiet);
    runtime.block_on(async {
        // A warm-up request: the first step allocates.
        let (first, began) = (job(&[1], 2, "warm"), Instant::now());
        User::listen(engine.submit(first)?, began, 0.0).await?;
        let began = Instant::now();
        let mut users = tokio::task::JoinSet::new();
        let (come, mut coming) = tokio::sync::mpsc::unbounded_channel();
        let (arriving, jobs) = (engine.clone(), arrivals(requests));
        let arriving =
            std::thread::spawn(move || arrive(&arriving, jobs, began, |user| drop(come.send(user))));
        while let Some((generation, arrival_s)) = coming.recv().await {
            users.spawn(User::listen(generation, began, arrival_s));
            bar.inc(1);
        }
        arriving.join().map_err(|_| anyhow::anyhow!("the thread of arrivals has stopped"))??;
        let mut heard = Vec::new();
        while let Some(user) = users.join_next().await {
            heard.push(user??);
        }
        bar.finish_and_clear();
        // The last token is sent before the iteration is recorded: wait for the engine to finish it.
        engine.inspect(|_| ()).await.context("the engine has died")?;
        Ok(heard)
    })
}

/// Waits for something short.
pub fn block_on<T>(what: impl Future<Output = T>) -> Option<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().ok()?;
    Some(runtime.block_on(what))
}

/// The jobs and their arrival times.
fn arrivals(requests: &[Request]) -> Vec<(Duration, Job)> {
    let job = |request: &Request| match &request.content {
        Prompt::SharedTokens(tokens) => {
            let arrival = Duration::from_nanos(request.arrival_ns);
            Some((arrival, job(tokens, request.output_tokens, request.salt())))
        }
        _ => None,
    };
    requests.iter().filter_map(job).collect()
}

/// Submits every job at its time. This runs on its own thread, because the timer of the listening thread has a
/// resolution of milliseconds, a large part of what is measured. `come` gets the generation and its scheduled arrival:
/// a late submission counts as waiting.
fn arrive(
    engine: &Engine,
    jobs: Vec<(Duration, Job)>,
    began: Instant,
    mut come: impl FnMut((GenerationHandle, f64)),
) -> anyhow::Result<()> {
    for (arrival, job) in jobs {
        std::thread::sleep(arrival.saturating_sub(began.elapsed()));
        ensure!(!interrupt::interrupted(), "interrupted; an unfinished run has no report");
        come((engine.submit(job)?, arrival.as_secs_f64()));
    }
    Ok(())
}

fn job(prompt: &[u32], max_new: u32, salt: &str) -> Job {
    Job { ignore_eos: true, salt: salt.into(), ..Job::new(prompt, max_new) }
}

/// The engine's events and decisions, in the order of a recording.
#[derive(Clone, Default)]
pub struct Recording(Arc<Mutex<String>>);

impl Recording {
    /// Takes the text so far.
    pub fn text(&self) -> String {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(|broken| broken.into_inner()))
    }
}

impl Watcher for Recording {
    fn stepped(&mut self, _: u64, _: u64, state: &mut EngineState) {
        let mut text = self.0.lock().unwrap_or_else(|broken| broken.into_inner());
        *text += &state.scheduler.events().take();
        *text += &state.scheduler.decisions().take();
    }
}
