//! Jobs with a pace: when the engine does not wait.
use crate::engines::*;
use kvist_engine::serving::*;
use std::sync::{Arc, Mutex};

/// When steps began, in nanoseconds on the engine's clock.
#[derive(Clone, Default)]
pub struct Starts(Arc<Mutex<Vec<u64>>>);

impl Starts {
    /// Of all steps that have answered. An engine answers before its watchers run, so this waits for them.
    pub async fn of(&self, engine: &Engine) -> Vec<u64> {
        engine.inspect(|_| ()).await;
        self.0.lock().unwrap().clone()
    }
}

impl Watcher for Starts {
    fn stepped(&mut self, now_ns: u64, end_ns: u64, _: &mut EngineState) {
        if end_ns > now_ns {
            self.0.lock().unwrap().push(now_ns);
        }
    }
}

/// Regression: the first step of a job with a pace waited for the time of the next token, although the engine had nothing else to do.
#[tokio::test]
async fn a_prompt_is_read_at_once() {
    let (starts, mut settings) = (Starts::default(), config(1024));
    settings.watchers.push(Box::new(starts.clone()));
    let engine = engine(settings);
    let prompt: Vec<u32> = (1..9).collect();
    // Each job is a step. On a slow machine the next one may come late by itself, but not each time.
    for n in 1..60 {
        receive(&mut engine.submit(Job { pace: Some(1), ..greedy(&prompt, 1) }).unwrap()).await;
        let starts = starts.of(&engine).await;
        assert_eq!(starts.len(), n);
        if starts.windows(2).any(|two| two[1] - two[0] < 1_000_000_000) {
            return;
        }
    }
    panic!("a second was between any two steps");
}

/// A pace is kept while another job waits for its place in the batch.
#[tokio::test]
async fn a_job_without_a_place_does_not_end_the_waiting() {
    let (starts, mut settings) = (Starts::default(), config(1024));
    settings.watchers.push(Box::new(starts.clone()));
    settings.scheduler.max_batch = 1;
    settings.fit();
    let engine = engine(settings);
    let prompt: Vec<u32> = (1..9).collect();
    let slow = |max_new| Job { pace: Some(1), ..greedy(&prompt, max_new) };
    let mut running = engine.submit(slow(2)).unwrap();
    let mut waiting = engine.submit(slow(1)).unwrap();
    assert_eq!(receive(&mut running).await.tokens.len(), 2);
    assert_eq!(receive(&mut waiting).await.tokens.len(), 1);
    let starts = starts.of(&engine).await;
    assert!(starts[1] - starts[0] >= 1_000_000_000, "{starts:?}");
}
